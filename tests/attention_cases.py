"""Small cases of paged attention that the Mosaic kernels are compared on, whatever their pages hold."""

import dataclasses

from pallas_kernels.paged_attention.shapes import Case

SMALL = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "page_size": 16, "layers": 2, "layer": 1}
DECODE = Case(
    name="lengths around pages and blocks, padding",
    **SMALL,
    rows=tuple((length, min(length, 1)) for length in (0, 1, 15, 16, 17, 31, 33, 65)),
    decode=True,
    table_pages=7,
)
FEW = dataclasses.replace(DECODE, name="few rows", rows=((70, 1), (20, 1), (0, 0)), table_pages=5)
WINDOW = dataclasses.replace(FEW, name="window, soft cap", rows=((70, 1), (21, 1), (3, 1)), window=20, soft_cap=2.0)
VERIFY = Case(
    name="1 to 8 queries", **SMALL, rows=((0, 0), (5, 5), (37, 5), (40, 8)), padded_tokens=3, table_pages=5, max_queries=8
)
