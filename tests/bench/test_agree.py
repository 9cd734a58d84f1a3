"""bench.agree gives what its docstring says."""

from bench import agree


def test_the_table_says_of_each_pair_whether_it_works_and_why_not():
    table = {row["with"]: row for row in agree.combinations()}
    ways = [*map(str, agree.WAYS)]
    every = [*ways, *agree.AS_THEY_COME]
    assert all([*row] == ["with", *every] for row in table.values())
    for way in agree.AS_THEY_COME:
        assert table["replicas"][way] == table["compiled stages"][way] == "works"
        assert table["clipping"][way] == "works"
        for what in ("post-validation", "a pipeline by 1F1B", "shards", "elastic ranks"):
            assert table[what][way].startswith("refused: a server that takes gradients")
    assert {table["replicas"][way] for way in ways} == {"works"}
    assert {table["clipping"][way] for way in ways} == {"works"}
    assert table["shards"]["bfloat16"] == "works"
    for what in ("shards", "an asynchronous pipeline", "elastic ranks"):
        for way in ("int8", "sign", "top:0.01", "rank:4", "delayed", "delayed:3"):
            assert table[what][way].startswith(f"refused: sums as {way} hold back"), (what, way)


def test_rows_have_every_way_and_peer_beside_the_formula(monkeypatch):
    told = {str(way): agree.Told([0.5], 1.0) for way in (*agree.WAYS, *agree.PEERS)}
    monkeypatch.setattr(agree, "played", lambda *_: told)
    monkeypatch.setattr(agree, "losses", lambda *_: (1.0, 0.0))
    rows = list(agree.rows("small gpt", [float("inf")], 1, 1, 1))
    assert [row["way"] for row in rows] == [*map(str, agree.WAYS), *agree.PEERS]
    assert rows[0]["bits"] == 32
    assert all(row["samples_per_s"] == 64 for row in rows)  # 8 micro-batches of 4 in half a second
    by_way = {row["way"]: row for row in rows[: len(agree.WAYS)]}
    assert 8 < by_way["int8"]["bits"] < 8.2
    assert 1 < by_way["sign"]["bits"] < 1.2
    assert by_way["delayed"]["sent_bytes"] == by_way["None"]["sent_bytes"]
    assert all(row["bits"] is None for row in rows[len(agree.WAYS) :])
