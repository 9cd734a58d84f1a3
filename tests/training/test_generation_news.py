"""Happened: what a person reads of ranks that went and came, while the run goes on."""

import json
from pathlib import Path

import penstock as ps
from penstock.training.generation_news import Happenings, event_words

ROW = {
    "step": 12,
    "what": "lost",
    "members": [0],
    "why": "rank 1 died: of 3 plans the best",
    "plan": "1 x 1 stages on 1 ranks, one_f_one_b, 8 micro-batches",
    "agreed_s": 0.1,
    "ready_s": 0.2,
    "stepped_s": 0.4,
    "predicted_step_s": 0.34,
}


class Ear(ps.Listener):
    def __init__(self) -> None:
        self.said = list[str]()

    def say(self, words: str) -> None:
        self.said.append(words)


def test_words_tell_who_went_and_what_the_new_plan_should_take() -> None:
    words = event_words(ROW)
    assert words.startswith("rank 1 died: 1 rank goes on after step 12, in 700 ms, by 1 x 1 stages")
    assert words.endswith("340 ms a step predicted")


def test_each_event_is_told_once_and_earlier_ones_never(tmp_path: Path) -> None:
    path, ear = tmp_path / "events.jsonl", Ear()
    path.write_text(json.dumps({**ROW, "step": 1}) + "\n")
    told = Happenings(tmp_path, ear)
    told.look()
    assert ear.said == []
    with path.open("a") as file:
        file.write(json.dumps(ROW) + "\n" + json.dumps({**ROW, "what": "begins"}) + "\n")
        file.write('{"half')
    told.look()
    told.look()
    assert ear.said == [event_words(ROW)]


def test_a_run_that_is_not_elastic_has_none(tmp_path: Path) -> None:
    Happenings(tmp_path, ear := Ear()).look()
    assert ear.said == []
