"""Jobs whose steps take turns, from the command line."""

import json

GAN = """
import itertools
import torch
from torch import nn
import penstock as ps

def data(start):
    for number in itertools.count(start):
        yield torch.randn(8, 4, generator=torch.Generator().manual_seed(number))

def judged(model, batch):
    made = model["maker"](batch).detach()
    return model["judge"](made).mean() - model["judge"](batch).mean()

def fooled(model, batch):
    return -model["judge"](model["maker"](batch)).mean()

def job():
    parts = {"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1)}
    turns = {"judge": ps.Turn(judged, "judge.*", steps=2), "maker": ps.Turn(fooled, "maker.*")}
    optimizer = lambda weights: torch.optim.Adam(weights, lr=1e-2)
    return ps.Job(lambda: nn.ModuleDict(parts), ps.in_turn(turns), data, optimizer, num_steps=9)
"""


def test_steps_of_each_turn_are_compared_and_planned_together(call, tmp_path):
    (tmp_path / "gan.py").write_text(GAN)
    done = call("check", tmp_path / "gan.py", "--set", "stages=1", "--json")
    told = json.loads(done.out)
    assert told["ok"] is True
    assert list(told["turns"]) == ["judge", "maker"]
    assert all(row["ok"] for row in told["turns"].values())
    place = tmp_path / "plan.json"
    told = json.loads(
        call("plan", tmp_path / "gan.py", "--ranks", "1", "--json", "--out", place).out
    )
    decided = {each["what"]: each for each in told["decisions"]}
    assert decided["turns"]["value"].startswith("judge 67%")
    refused = call("check", tmp_path / "gan.py", "--plan", place)
    assert refused.code == 2
    assert "one of the turns" in refused.err
