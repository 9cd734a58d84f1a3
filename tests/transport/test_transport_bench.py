"""The bench of the transports gives what its docstring says."""

from bench import transport


def test_bench_has_a_row_for_each_transport_operation_and_size():
    result = transport.run(1)
    rows = {(r["operation"], r["transport"], r["size_bytes"]): r for r in result["rows"]}
    sizes = [("message", s) for s in transport.SIZES] + [("sum", s) for s in transport.SUM_SIZES]
    names = ("gloo", "shared_memory", "threads")
    assert sorted(rows) == sorted((op, name, size) for op, size in sizes for name in names)
    assert len(rows) == len(result["rows"])
    for row in rows.values():
        assert 0 < row["best_us"] <= row["median_us"]
        assert row["bytes_per_s"] > 0
    assert {"cpu", "cores", "torch", "load"} <= set(result["machine"])
