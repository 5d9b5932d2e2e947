"""Reading YAML: the core schema of 1.2, places, merging, overlays, --set (rules 1, 2, 5, 8, 16; reports B74, B75, B77)."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from llmjax.pipeline.source import parse, plain_scalar, read_file, read_layers, read_set
from llmjax.pipeline.tree import ConfigErrors, Node, Origin, dotted, merge, split_path


def plain(node: Node) -> object:
    """The tree as Python values."""
    if isinstance(node.value, dict):
        return {name: plain(child) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def read(text: str) -> object:
    node, problems = parse(text, Origin("f.yaml"))
    assert not problems
    assert node is not None
    return plain(node)


def problems_in(text: str) -> list[str]:
    return [str(problem) for problem in parse(text, Origin("f.yaml"))[1]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("No", "No"), ("on", "on"), ("off", "off"), ("yes", "yes"), ("y", "y"), ("n", "n"),
        ("true", True), ("True", True), ("FALSE", False), ("tRue", "tRue"),
        ("010", 10), ("0o10", 8), ("0x1F", 31), ("0b11", "0b11"), ("1_000", "1_000"), ("+12", 12), ("-0", 0), ("08", 8),
        ("1e-5", 1e-5), ("1E+5", 1e5), ("1e5", 1e5), (".5", 0.5), ("5.", 5.0), ("1.10", 1.1),
        ("-.inf", -math.inf), (".Inf", math.inf),
        ("12:30", "12:30"), ("3:1", "3:1"), ("1:30:00.5", "1:30:00.5"),
        ("2026-01-02", "2026-01-02"), ("2026-01-02T10:00:00Z", "2026-01-02T10:00:00Z"),
        ("~", None), ("null", None), ("Null", None), ("", None), ("nULL", "nULL"),
        ("=", "="), ("1.2.3", "1.2.3"), ("0x", "0x"), ("1e", "1e"), ("e5", "e5"), (".", "."), ("-", "-"), ("0o8", "0o8"),
        ("'no'", "no"), ('"010"', "010"), ("'1e-5'", "1e-5"), ('"true"', "true"), ("''", ""),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    if text != "-":
        found = read(f"key: {text}\n")
        assert found == {"key": value}
        assert type(found["key"]) is type(value)  # type: ignore[index]
    if not text.startswith(("'", '"')):
        assert plain_scalar(text) == value


def test_nan_and_huge_numbers() -> None:
    assert math.isnan(plain_scalar(".nan"))  # type: ignore[arg-type]
    assert plain_scalar("9" * 5000) == "9" * 5000  # not an integer that Python would refuse to print


def test_keys_are_texts_and_have_places() -> None:
    node, _ = parse("on: 1\n50256: 2\ntrue: 3\n", Origin("f.yaml"))
    assert node is not None
    assert list(node.mapping()) == ["on", "50256", "true"]
    child = parse("a:\n  - x\n  - {b: y}\n", Origin("f.yaml"))[0].at(("a", 1, "b"))  # type: ignore[union-attr]
    assert (str(child.key), str(child.origin)) == ("f.yaml:3:6", "f.yaml:3:9")


def test_explicit_tags() -> None:
    assert read('a: !!str 12\nb: !!int "3"\nc: !!float 1\nd: !!map {}\n') == {"a": "12", "b": 3, "c": 1.0, "d": {}}
    assert problems_in("a: !secret x\n") == ["f.yaml:1:4: the tag !secret is not supported; write a plain value"]
    assert problems_in("a: !!int x\n") == ["f.yaml:1:4: 'x' does not fit its tag !!int"]
    assert "is not supported" in problems_in("a: !!python/object:os.system {}\n")[0]


def test_duplicate_keys_name_both_places() -> None:
    assert problems_in("a: 1\nb: 2\na: 3\n") == ["f.yaml:3:1: the key 'a' is there twice; the first is at f.yaml:1:1"]
    assert problems_in('{1: a, "1": b}') == ["f.yaml:1:8: the key '1' is there twice; the first is at f.yaml:1:2"]


def test_anchors_work_and_merge_keys_do_not() -> None:
    assert read("a: &x {k: 1}\nb: *x\n") == {"a": {"k": 1}, "b": {"k": 1}}
    assert read("a: &x 1\nb: &x 2\nc: *x\n") == {"a": 1, "b": 2, "c": 2}  # an anchor may be used again
    assert "YAML 1.1" in problems_in("a: &x {k: 1}\nb: {<<: *x, l: 2}\n")[0]
    for text, why in (("a: *nope\n", "is not defined above"), ("a: &x [*x]\n", "contains itself")):
        with pytest.raises(ConfigErrors, match=why):
            parse(text, Origin("f.yaml"))


def test_bombs_are_refused() -> None:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    with pytest.raises(ConfigErrors, match="more than 100000 values"):
        parse(laughs, Origin("f.yaml"))
    with pytest.raises(ConfigErrors, match="nested more than 64 levels"):
        parse("[" * 70 + "]" * 70, Origin("f.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\n", r"^f\.yaml:2:1: not valid YAML: "),
        ("a: b: c\n", r"^f\.yaml:1:5: not valid YAML: "),
        ("a:\n\t- b\n", r"^f\.yaml:2:1: not valid YAML: "),
        ("a: 1\n---\nb: 2\n", r"^f\.yaml:2:1: a second document"),
        ("a: \x00\n", "is not allowed"),
    ],
)
def test_broken_yaml_is_one_located_line(text: str, message: str) -> None:
    with pytest.raises(ConfigErrors, match=message) as caught:
        parse(text, Origin("f.yaml"))
    assert len(caught.value.messages) == 1
    assert "\n" not in caught.value.messages[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"~\n", "is empty"),
        (b"- a\n", ":1:1: the file holds a list"),
        (b"word\n", "the file holds a single value"),
        (b"a: 1\nb: \xff\xfe\n", r"is not UTF-8 \(byte 0xff in line 2\)"),
        ("a: 1".encode("utf-16"), "is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_a_pipeline(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigErrors, match=message) as caught:
        read_file(path, "f.yaml", 0)
    assert len(caught.value.messages) == 1
    assert caught.value.messages[0].startswith("f.yaml")


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigErrors, match=r"^here: is a folder"):
        read_file(tmp_path, "here", 0)
    with pytest.raises(ConfigErrors, match=r"^gone: no such file"):
        read_file(tmp_path / "gone", "gone", 0)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigErrors, match=r"^f: cannot be read: Permission denied"):
        read_file(tmp_path / "f", "f", 0)


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: no\r\n")
    assert plain(read_file(path, "f", 0)[0]) == {"a": 1, "b": "no"}


def test_merging_mappings_deep_lists_whole_null_deletes() -> None:
    low, high = (
        parse(t, Origin(n))[0]
        for t, n in (("a: {x: 1, y: [1, 2], z: {p: 1}}\nb: 1\n", "low"), ("a: {y: [3], x: null, z: {q: 2}, w: null}\n", "high"))
    )
    assert low is not None
    assert high is not None
    merged = merge(low, high)
    assert plain(merged) == {"a": {"y": [3], "z": {"p": 1, "q": 2}, "w": None}, "b": 1}
    assert merged.at(("a", "y")).origin.source == "high"
    assert merged.at(("a", "z", "p")).origin.source == "low"


def layers(tmp_path: Path, files: dict[str, str], **options: object) -> object:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sources = read_layers(tmp_path / "main.yaml", environ={}, **options)  # type: ignore[arg-type]
    assert not sources.problems, sources.problems
    return plain(sources.tree)


def test_precedence_extends_file_overlay_set_values(tmp_path: Path) -> None:
    files = {
        "one.yaml": "a: 1\nb: 1\nc: 1\nd: 1\ne: 1\nf: 1\n",
        "two.yaml": "b: 2\nc: 2\nd: 2\ne: 2\nf: 2\n",
        "main.yaml": "extends: [one.yaml, two.yaml]\nc: 3\nd: 3\ne: 3\nf: 3\n",
        "over.yaml": "d: 4\ne: 4\nf: 4\n",
    }
    found = layers(tmp_path, files, overlays=[tmp_path / "over.yaml"], sets=["e=5", "f=5"], values={"f": 6})
    assert found == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}


def test_order_under_extends_parents_first_and_overridden_stages_keep_their_place(tmp_path: Path) -> None:
    files = {
        "base.yaml": "stages: {one: {x: 1}, two: {x: 1}}\n",
        "main.yaml": "extends: base.yaml\nstages: {new: {x: 2}, one: {x: 2}}\n",
    }
    found = layers(tmp_path, files)
    assert list(found["stages"]) == ["one", "two", "new"]  # type: ignore[index]
    assert found["stages"]["one"] == {"x": 2}  # type: ignore[index]


def test_extends_is_relative_to_its_file_and_a_diamond_is_fine(tmp_path: Path) -> None:
    files = {
        "main.yaml": "extends: [sub/left.yaml, sub/right.yaml]\n",
        "sub/left.yaml": "extends: deep/root.yaml\nl: 1\n",
        "sub/right.yaml": "extends: ./deep/root.yaml\nr: 1\n",
        "sub/deep/root.yaml": "x: 1\n",
    }
    assert layers(tmp_path, files) == {"x": 1, "l": 1, "r": 1}


def test_extends_in_a_circle_names_the_chain(tmp_path: Path) -> None:
    for name, parent in (("main", "b"), ("b", "c"), ("c", "main")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {parent}.yaml\n")
    with pytest.raises(ConfigErrors, match="goes in a circle") as caught:
        read_layers(tmp_path / "main.yaml", environ={})
    names = [part.rsplit("/", 1)[-1] for part in caught.value.messages[0].split(" -> ")]
    assert names == ["main.yaml", "b.yaml", "c.yaml", "main.yaml"]


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("gone.yaml", "extends: no such file: .*gone.yaml"),
        ("3", "expected a path"),
        ("${vars.x}", "cannot be used here"),
        ("${env:NO}", "NO is not set"),
    ],
)
def test_wrong_extends_is_located(tmp_path: Path, extends: str, message: str) -> None:
    (tmp_path / "main.yaml").write_text(f"extends: {extends}\n")
    problems = read_layers(tmp_path / "main.yaml", environ={}).problems
    assert len(problems) == 1
    assert str(problems[0].origin).endswith("main.yaml:1:10")
    with pytest.raises(ConfigErrors, match=message):
        raise ConfigErrors.of(problems)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=false", {"a": {"b": False}}),
        ("a=010", {"a": 10}),
        ("a=no", {"a": "no"}),
        ("a=1e-3", {"a": 1e-3}),
        ("a=[1, two, '3']", {"a": [1, "two", "3"]}),
        ("a={x: 1}", {"a": {"x": 1}}),
        ('a="3"', {"a": "3"}),
        ("a=x=y", {"a": "x=y"}),
        ("a=", {"a": None}),
        ('a=""', {"a": ""}),
        ('a."b.c".d=1', {"a": {"b.c": {"d": 1}}}),
        ("a= spaced ", {"a": "spaced"}),
        ("a.b=모델 é.gguf", {"a": {"b": "모델 é.gguf"}}),
    ],
)
def test_set_is_read_by_the_rules_of_the_file(text: str, value: object) -> None:
    node, problems = read_set(text, 0)
    assert plain(node) == value
    assert not problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.b", "write it as a.b.c=value"),
        ("=1", "is not a path of keys"),
        ("a..b=1", "is not a path of keys"),
        ("a=[1", r"^--set a: not valid YAML"),
        ("a=*x", "quote the value"),
    ],
)
def test_wrong_set_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigErrors, match=message):
        read_set(text, 0)


def test_set_cannot_name_another_version(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("apiVersion: llmjax/v1\n")
    (problem,) = read_layers(path, sets=["apiVersion=llmjax/v9"], environ={}).problems
    assert str(problem).startswith("--set apiVersion: ")
    assert "llmjax/v9" in str(problem)


def test_paths_read_and_write() -> None:
    assert split_path('a."b.c"."q\\""') == ("a", "b.c", 'q"')
    assert dotted(("a", 0, "b.c", "d")) == 'a[0]."b.c".d'


def test_importing_the_package_needs_neither_pydantic_nor_ruamel() -> None:
    heavy = ("pydantic", "ruamel.yaml", "jax", "numpy", "rich")
    code = f"import sys, llmjax, llmjax.pipeline\nprint([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
