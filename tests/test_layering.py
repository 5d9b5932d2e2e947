"""Who may import whom, read from the source: the borders are what keeps the engine changeable."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax"}
HEAVY = {"llguidance", "pydantic", "starlette", "ruamel", "transformers", "typer", "rich", "torch"}

# package (or file) -> llmjax packages it may import at module level; its own is always allowed
ALLOWED: dict[str, set[str]] = {
    "llmjax.version": set(),
    "llmjax.errors": set(),
    "llmjax.structured_output": {"errors"},
    "llmjax.sampling_params": {"errors", "structured_output"},
    "llmjax.telemetry": set(),
    "llmjax.scheduling": {"errors", "sampling_params", "telemetry"},
    "llmjax.model": {"errors", "telemetry"},
    "llmjax.page": set(),
    "llmjax.quantization": {"errors", "sampling_params", "telemetry", "model", "page"},
    "llmjax.engine": {"errors", "sampling_params", "structured_output", "telemetry", "scheduling", "model"},
    "llmjax.loadtest": {"errors", "sampling_params", "structured_output", "telemetry", "engine", "page"},
    "llmjax.server": {"version", "errors", "sampling_params", "structured_output", "telemetry", "engine"},
    "llmjax.pipeline": {
        "errors",
        "sampling_params",
        "structured_output",
        "telemetry",
        "engine",
        "server",
        "model",
        "loadtest",
        "quantization",
    },
    "llmjax.cli": {"errors", "sampling_params", "structured_output", "telemetry", "engine", "server", "model", "pipeline"},
}
HOST_ONLY = [
    "llmjax/__init__.py", "llmjax/version.py", "llmjax/errors.py", "llmjax/sampling_params.py", "llmjax/structured_output.py",
    "llmjax/cli",
    "llmjax/scheduling", "llmjax/telemetry", "llmjax/server", "llmjax/pipeline", "llmjax/loadtest", "llmjax/page",
    "llmjax/model/config.py", "llmjax/model/hf_config.py", "llmjax/model/hf_rope.py", "llmjax/model/config_fields.py",
    "llmjax/model/param_spec.py", "llmjax/model/checkpoint/gguf_file.py",
    "llmjax/model/quantization.py", "llmjax/model/checkpoint/compressed_tensors.py", "llmjax/model/checkpoint/hf_export.py",
    "llmjax/quantization/__init__.py", "llmjax/quantization/log_bins.py", "llmjax/quantization/observers.py",
    "llmjax/quantization/samples.py", "llmjax/quantization/calibration.py", "llmjax/quantization/drift.py",
    "llmjax/quantization/plan.py", "llmjax/quantization/patterns.py",
    "llmjax/engine/config.py", "llmjax/engine/outputs.py", "llmjax/engine/output_processor.py", "llmjax/engine/engine_trace.py",
    "llmjax/engine/tokenizer.py", "llmjax/engine/hf_tokenizer.py", "llmjax/engine/gguf_tokenizer.py",
    "llmjax/engine/token_pieces.py", "llmjax/engine/chat_template.py", "llmjax/engine/detokenizer.py",
    "llmjax/engine/stop_strings.py", "llmjax/engine/text_output.py", "llmjax/engine/grammar.py", "llmjax/engine/grammar_rows.py",
    "llmjax/engine/grammar_drafts.py", "llmjax/engine/prompt_lookup.py", "llmjax/engine/row_masks.py",
    "llmjax/engine/async_engine.py", "llmjax/engine/request_stream.py", "llmjax/engine/engine_client.py",
    "llmjax/engine/health.py", "llmjax/engine/engine_messages.py", "llmjax/engine/engine_socket.py",
    "llmjax/engine/remote_engine.py", "llmjax/engine/engine_state.py", "llmjax/engine/engine_stats.py",
    "llmjax/engine/engine_view.py", "llmjax/quantization/agreement.py", "llmjax/quantization/engine_model.py",
    "llmjax/quantization/gate.py", "llmjax/quantization/loops.py", "llmjax/quantization/quality.py",
    "llmjax/quantization/report.py", "llmjax/quantization/report_page.py", "llmjax/quantization/scores.py",
    "llmjax/quantization/tasks.py",
]  # fmt: skip


def python_files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


def imports(path: Path, *, module_level: bool) -> set[str]:
    """Full names imported by a file; with `module_level` those that run when it is imported."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    nodes: list[ast.AST] = list(tree.body) if module_level else [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if module_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        nodes += ast.iter_child_nodes(node)
    return found


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:2])


@pytest.mark.parametrize("path", python_files("llmjax"), ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_import_only_what_lies_below(path: Path) -> None:
    own = package_of(path)
    if own == "llmjax.__init__" or own == "llmjax.__main__":
        return
    assert own in ALLOWED, f"{own} is not in the table of layers"
    for name in imports(path, module_level=True):
        if name.startswith("llmjax."):
            target = name.split(".")[1]
            assert f"llmjax.{target}" == own or target in ALLOWED[own], f"{path.name} imports {name}"


@pytest.mark.parametrize("path", python_files("pallas_kernels"), ids=lambda p: str(p.relative_to(ROOT)))
def test_kernels_stand_alone(path: Path) -> None:
    standard = set(sys.stdlib_module_names)
    for name in imports(path, module_level=False):
        assert name.split(".")[0] in standard | {"jax", "jaxtyping", "numpy", "pallas_kernels"}, name


@pytest.mark.parametrize("path", [p for place in HOST_ONLY for p in python_files(place)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_host_side_never_imports_jax(path: Path) -> None:
    for name in imports(path, module_level=True):
        assert name.split(".")[0] not in DEVICE_LIBRARIES, f"{path.name} imports {name}"


def test_model_and_scheduling_meet_only_in_the_runner() -> None:
    meeting = []
    for path in python_files("llmjax/engine"):
        names = imports(path, module_level=True)
        uses_model = any(name.startswith(("jax", "flax")) for name in names)
        uses_scheduling = any(name.startswith("llmjax.scheduling.request.Scheduled") for name in names)
        if uses_model and uses_scheduling:
            meeting.append(path.name)
    assert set(meeting) <= {"runner.py", "self_check.py"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("llmjax", HEAVY | DEVICE_LIBRARIES),
        ("llmjax.scheduling.scheduler", HEAVY | DEVICE_LIBRARIES),
        ("llmjax.sampling_params", HEAVY | DEVICE_LIBRARIES),
        ("llmjax.pipeline", DEVICE_LIBRARIES | {"torch", "transformers"}),
        ("llmjax.cli", DEVICE_LIBRARIES | {"torch", "transformers"}),
        ("llmjax.engine.async_engine", HEAVY | DEVICE_LIBRARIES),
        ("llmjax.engine.remote_engine", HEAVY | DEVICE_LIBRARIES | {"numpy"}),
        (
            "llmjax.server.supervisor",
            HEAVY | DEVICE_LIBRARIES | {"numpy", "uvicorn", "jinja2", "tokenizers", "prometheus_client"},
        ),
        ("llmjax.server.worker", DEVICE_LIBRARIES | {"numpy", "ruamel", "transformers", "typer", "rich", "torch"}),
        ("llmjax.server.engine_front", HEAVY | DEVICE_LIBRARIES),
        ("llmjax.engine.engine", {"pydantic", "starlette", "ruamel", "torch"}),
    ],
)
def test_what_an_import_brings_along(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*{{m.split('.')[0] for m in sys.modules}})"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & forbidden


def test_no_shapeless_names() -> None:
    for place in ("llmjax", "pallas_kernels", "bench", "tests"):
        for path in python_files(place):
            assert path.name not in {"utils.py", "common.py", "manager.py", "helpers.py", "misc.py"}, path
