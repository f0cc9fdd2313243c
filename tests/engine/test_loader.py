"""A loader that is stopped anywhere and resumed elsewhere: what comes out is what would have come out."""

from __future__ import annotations

import json
import logging
import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from onefold.checkpoint.state.random_states import capture_random_states, restore_random_states
from onefold.loader import ResumableLoader
from onefold.utils import RepeatingLoader

CPU = torch.device("cpu")


class Numbers(Dataset):
    """Counts what is read of it, and can draw random numbers."""

    def __init__(self, size, draws=False):
        self.size = size
        self.draws = draws
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return (index, torch.rand(1).item()) if self.draws else index


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size
        self.read = []

    def __iter__(self):
        for index in range(self.size):
            self.read.append(index)
            yield index


class StatefulStream(Stream):
    start = next = 0

    def __iter__(self):
        self.next, self.start = self.start, 0
        while self.next < self.size:
            self.next += 1
            self.read.append(self.next - 1)
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.start = state["next"]


def as_list(items):
    return list(items)


def make(dataset, batch_size=3, world_size=1, rank=0, **options):
    return ResumableLoader(dataset, world_size, rank, batch_size=batch_size, collate_fn=as_list, **options)


def resume(state, *args, **kwargs):
    loader = make(*args, **kwargs)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def flat(batches):
    return [item for batch in batches for item in batch]


# -- the same run, stopped and resumed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "world_size", "rank"), [(12, 1, 0), (13, 1, 0), (25, 2, 1), (29, 3, 2), (2, 4, 3)])
def test_resumed_order_is_the_uninterrupted_one(size, world_size, rank, drop_last):
    options = {"world_size": world_size, "rank": rank, "drop_last": drop_last}
    straight = make(Numbers(size), **options)
    straight.sampler.set_epoch(4)
    expected = list(straight)
    for stop in range(len(expected) + 1):
        loader = make(Numbers(size), **options)
        loader.sampler.set_epoch(4)
        batches = iter(loader)
        seen = [next(batches) for _ in range(stop)]
        state = loader.state_dict()
        resumed = resume(state, Numbers(size), **options)
        assert resumed.state_dict() == state
        rest = list(resumed)
        assert seen + rest == expected == seen + list(batches)
        assert resumed.dataset.read == flat(rest), "skipped samples are not read"
        assert resumed.state_dict() == loader.state_dict(), "both are between two passes"
        assert resumed.state_dict()["samples"] == 0
        assert list(resumed) == expected, "the next pass is a whole one"
        assert len(resumed) == len(loader) == len(expected)


def test_the_state_is_plain():
    loader = make(Numbers(10), world_size=2, rank=1)
    assert isinstance(loader, DataLoader)
    assert loader.state_dict() == {"epoch": 0, "samples": 0, "world_size": 2, "batch_size": 3}
    loader.sampler.set_epoch(7)
    batches = iter(loader)
    assert [next(batches) and loader.state_dict()["samples"] for _ in range(2)] == [6, 10]
    assert loader.state_dict() == {"epoch": 7, "samples": 10, "world_size": 2, "batch_size": 3}
    loader.sampler.set_epoch(8)
    assert loader.state_dict()["epoch"] == 7, "this pass still is of epoch 7"
    assert next(batches, None) is None
    assert loader.state_dict() == {"epoch": 8, "samples": 0, "world_size": 2, "batch_size": 3}


def test_random_numbers_drawn_by_the_dataset_go_on():
    torch.manual_seed(1)
    straight = make(Numbers(11, draws=True))
    expected = []
    for epoch in range(3):
        straight.sampler.set_epoch(epoch)
        expected += [(batch, torch.rand(1).item()) for batch in straight]
    per_epoch = len(straight)
    for stop in range(len(expected)):
        torch.manual_seed(1)
        loader, seen = make(Numbers(11, draws=True)), []
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                seen.append((batch, torch.rand(1).item()))
                if len(seen) > stop:
                    break
            if len(seen) > stop:
                break
        state, random_state = loader.state_dict(), capture_random_states(CPU)

        torch.manual_seed(99)
        loader = resume(state, Numbers(11, draws=True))
        restore_random_states(random_state, CPU)
        for epoch in range(stop // per_epoch, 3):
            loader.sampler.set_epoch(epoch)
            seen += [(batch, torch.rand(1).item()) for batch in loader]
        assert seen == expected


def test_a_pass_that_begins_draws_as_torch_does():
    """Saved between two passes, the seed for workers is still to be drawn."""
    loader = make(Numbers(6))
    for state in (loader.state_dict(), None):
        torch.manual_seed(3)
        resumed = make(Numbers(6)) if state is None else resume(state, Numbers(6))
        list(resumed)
        drawn = torch.rand(1).item()
        torch.manual_seed(3)
        list(DataLoader(Numbers(6), batch_size=3))
        assert torch.rand(1).item() == drawn


def test_a_pass_that_has_drawn_its_seed_draws_no_other():
    """A position that is loaded after `iter` and before the first batch starts the pass anew."""
    loader = make(Numbers(6))
    state = loader.state_dict()
    assert state["samples"] == 0
    torch.manual_seed(3)
    batches = iter(loader)
    loader.load_state_dict(state)
    assert len(list(batches)) == 2
    drawn = torch.rand(1).item()
    torch.manual_seed(3)
    list(DataLoader(Numbers(6), batch_size=3))
    assert torch.rand(1).item() == drawn


def test_workers_keep_the_order():
    expected = list(make(Numbers(20)))
    loader = make(Numbers(20))
    batches = iter(loader)
    seen = [next(batches), next(batches)]
    resumed = resume(loader.state_dict(), Numbers(20), num_workers=2)
    seen += [next(batches := iter(resumed))]
    assert resumed.state_dict()["samples"] == 9, "what workers have read ahead was not handed out"
    assert seen + list(batches) == expected


# -- elsewhere ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [24, 37])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_another_number_of_ranks_misses_nothing(size, before, after, drop_last):
    options = {"batch_size": 2, "drop_last": drop_last}
    for stop in range(len(make(Numbers(size), world_size=before, **options)) + 1):
        seen, states = [], []
        for rank in range(before):
            loader = make(Numbers(size), world_size=before, rank=rank, **options)
            loader.sampler.set_epoch(2)
            seen += flat(next(batches) for batches in [iter(loader)] for _ in range(stop))
            states.append(loader.state_dict())
        assert all(state == states[0] for state in states)
        rest = []
        for rank in range(after):
            rest += flat(resume(states[0], Numbers(size), world_size=after, rank=rank, **options))
        if stop * 2 * before >= size:
            assert not rest
        elif not drop_last:
            assert set(seen) | set(rest) == set(range(size))
        if drop_last:
            assert len(set(seen) & set(rest)) < after
            assert len(set(seen) | set(rest)) > size - 2 * after - max(before, after)
        else:
            assert len(set(seen) & set(rest)) < after + after  # as many again where the list is padded


def test_another_batch_size_goes_on_at_the_same_sample():
    expected = flat(make(Numbers(20)))
    loader = make(Numbers(20))
    seen = next(iter(loader))
    second = resume(loader.state_dict(), Numbers(20), batch_size=5)
    seen += next(iter(second))
    third = resume(second.state_dict(), Numbers(20), batch_size=4)
    assert seen + flat(third) == expected


# -- several passes ----------------------------------------------------------------------------------------------------


def test_the_newest_pass_counts():
    loader = make(Numbers(12))
    first = iter(loader)
    next(first), next(first)
    second = iter(loader)
    assert loader.state_dict()["samples"] == 0
    next(second)
    next(first)
    assert loader.state_dict()["samples"] == 3
    expected = list(make(Numbers(12)))
    loader.load_state_dict(loader.state_dict() | {"samples": 6})
    resumed = iter(loader)
    other = iter(loader)
    assert next(other) == expected[0]
    assert next(resumed) == expected[2], "a position is for one pass"
    assert list(loader.sampler) == flat(expected), "and is not the sampler's"


def test_a_position_belongs_to_its_epoch(caplog):
    loader = make(Numbers(12))
    loader.load_state_dict({"epoch": 2, "samples": 6, "world_size": 1, "batch_size": 3})
    assert loader.sampler.epoch == 2
    loader.sampler.set_epoch(3)
    with caplog.at_level(logging.INFO, "onefold"):
        assert len(list(loader)) == 4
        assert "epoch 3 starts at its first batch: the saved epoch is 2" in caplog.text
        caplog.clear()
        loader.load_state_dict({"epoch": 2, "samples": 0, "world_size": 1, "batch_size": 3})
        loader.sampler.set_epoch(3)
        assert len(list(loader)) == 4
        assert not caplog.text, "nothing was left of epoch 2"


def test_a_pass_under_way_follows():
    """So does a RepeatingLoader that was made before the checkpoint was loaded."""
    expected = list(make(Numbers(12)))
    loader = make(Numbers(12))
    batches = iter(loader)
    first = [next(batches), next(batches)]
    state = loader.state_dict()
    assert first + list(batches) == expected
    for taken in range(4):
        loader = make(Numbers(12))
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        loader.load_state_dict(state)
        assert list(batches) == expected[2:]


@pytest.mark.parametrize("made_before", [True, False])
def test_a_repeating_loader_resumes(made_before):
    def start():
        torch.manual_seed(5)
        loader = make(Numbers(11, draws=True))
        return loader, RepeatingLoader(loader)

    _, straight = start()
    expected = [next(straight) for _ in range(14)]
    for stop in range(1, 14):
        loader, repeating = start()
        seen = [next(repeating) for _ in range(stop)]
        state, random_state = repeating.state_dict(), capture_random_states(CPU)
        assert state == loader.state_dict()
        torch.manual_seed(6)
        loader = make(Numbers(11, draws=True))
        repeating = RepeatingLoader(loader)
        loader.load_state_dict(state)
        if not made_before:
            repeating = RepeatingLoader(loader)
        restore_random_states(random_state, CPU)
        assert seen + [next(repeating) for _ in range(14 - stop)] == expected
        assert repeating.epoch == loader.sampler.epoch == 3


def test_a_repeating_loader_counts_for_itself_over_other_loaders():
    repeating = RepeatingLoader([1, 2])
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert repeating.epoch == 2


# -- datasets without an order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_an_iterable_dataset_resumes(kind, caplog):
    expected = list(make(kind(11)))
    for stop in range(len(expected) + 1):
        loader = make(kind(11), world_size=2)
        batches = iter(loader)
        seen = [next(batches) for _ in range(stop)]
        caplog.clear()
        with caplog.at_level(logging.INFO, "onefold"):
            state = loader.state_dict()
            resumed = resume(state, kind(11), world_size=2)
            assert resumed.state_dict() == state
            torch.manual_seed(8)
            rest = iter(resumed)
            if stop:
                assert torch.rand(1).equal(torch.rand(1, generator=torch.Generator().manual_seed(8)))
            rest = list(rest)
        assert seen + rest == expected
        assert ("dataset" in state) == (kind is StatefulStream and stop > 0)
        assert (f"{stop} batches of Stream are read and dropped" in caplog.text) == (kind is Stream and stop > 0)
        assert resumed.dataset.read == (flat(expected) if kind is Stream else flat(rest))
        assert resumed.state_dict()["samples"] == 0


def test_a_stateful_dataset_in_workers_is_read_again(caplog):
    loader = make(StatefulStream(11), num_workers=1)
    next(batches := iter(loader))
    state = loader.state_dict()
    assert "dataset" not in state
    resumed = resume(state, StatefulStream(11))
    with caplog.at_level(logging.INFO, "onefold"):
        assert list(resumed) == list(batches)
    assert "read and dropped" in caplog.text


@pytest.mark.parametrize(
    "state", [None, {}, {"epoch": 0, "samples": -1, "world_size": 1, "batch_size": 1}, {"epoch": True, "samples": 1}]
)
def test_a_malformed_position_is_refused(state):
    loader = make(Numbers(4))
    with pytest.raises(ValueError, match="position in the data has no valid"):
        loader.load_state_dict(state)
    assert len(list(loader)) == 2


def test_random_is_untouched():
    """Only torch draws a seed for a pass."""
    random.seed(1)
    expected = random.Random(1).random()
    list(make(Numbers(4)))
    assert random.random() == expected
