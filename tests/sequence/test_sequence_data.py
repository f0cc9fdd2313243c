"""Parts of batches from loaders, checkpoints between divided and whole sequences, and the plan of divided ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import config, rank, start
from test_sequence_parallel import LENGTH, MICRO, VOCABULARY, plain_model, samples, sent_elements, transformers_model

import onefold
from onefold.comm.nodes import Nodes
from onefold.config import load_config
from onefold.sequence.parts import split_batch
from onefold.tools.estimate.dry_run import dry_run


def test_labels_are_shifted_before_the_split():
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6), "name": "a"}
    parts = [split_batch(batch, 2, each, shifts_labels=True) for each in range(2)]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], 1), batch["input_ids"])
    assert parts[0]["shift_labels"].tolist() == [[1, 2, 3], [7, 8, 9]]
    assert parts[1]["shift_labels"].tolist() == [[4, 5, -100], [10, 11, -100]]
    assert parts[1]["position_ids"].tolist() == [[3, 4, 5], [3, 4, 5]]
    assert parts[0]["labels"] is parts[0]["shift_labels"]
    assert parts[0]["name"] == "a"
    as_they_are = split_batch(batch, 2, 1, shifts_labels=False)
    assert as_they_are["labels"].tolist() == [[3, 4, 5], [9, 10, 11]]
    pair = split_batch((batch["input_ids"], torch.ones(2)), 2, 1, shifts_labels=False)
    assert pair[0].tolist() == [[3, 4, 5], [9, 10, 11]]
    assert pair[1].tolist() == [1, 1]
    classes = split_batch([batch["input_ids"], torch.ones(2, 4)], 2, 1, shifts_labels=False)[1]
    assert classes.shape == (2, 4)  # not one of tokens


def of_loader() -> Any:
    engine = start(transformers_model("Llama", 4, 2), config(2, sequence_parallel_size=2))
    # Ranks 1 and 3 have one batch more.
    mine = [samples(step, rank()) | {"number": 10 * rank() + step} for step in range(2 + rank() % 2)]
    loader = engine.sequence_parallel.loader(mine)
    assert len(loader) == 2 * len(mine)
    assert loader.count(None) == 0  # an attribute of the inner loader
    found = [(part["number"], part["input_ids"]) for part in loader]
    with pytest.raises(TypeError, match="extra in the batch is a set"):
        next(iter(engine.sequence_parallel.loader([samples(0, 0) | {"extra": {1}}])))
    engine.destroy()
    return found


def test_a_loader_of_other_batches_on_every_rank(on_ranks):
    found = on_ranks(4, of_loader)
    for first in (0, 2):
        numbers = [[number for number, _ in found[each]] for each in (first, first + 1)]
        in_order = [10 * each + step for step in range(2) for each in (first, first + 1)]
        assert numbers == [[*in_order, 10 * (first + 1) + 2]] * 2
        for (number, low), (_, high) in zip(found[first], found[first + 1], strict=True):
            whole = samples(number % 10, number // 10)["input_ids"]
            assert torch.equal(torch.cat([low, high], 1), whole)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        ids = torch.full((LENGTH,), index)
        return {"input_ids": ids, "labels": ids}


def of_training_data() -> Any:
    settings = config(2, sequence_parallel_size=2, train_micro_batch_size_per_gpu=2)
    model = transformers_model("Llama", 4, 2)
    engine, _, loader, _ = onefold.initialize(model=model, config=settings, training_data=Rows())
    found = [part["input_ids"] for part in loader]
    engine.destroy()
    return [part[:, 0].tolist() for part in found], {part.shape for part in found}


def test_the_engines_loader_gives_parts_of_the_same_samples(on_ranks):
    found = on_ranks(4, of_training_data)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert {shape for _, shapes in found for shape in shapes} == {(2, LENGTH // 2)}
    assert sorted(number for rows, _ in (found[0], found[2]) for row in rows for number in row) == list(range(16))


def step(engine: Any, number: int) -> float:
    part = engine.sequence_parallel.split(samples(number, rank() // engine.sequence_parallel.size))
    loss = engine.sequence_parallel.mean_loss(engine(**part).loss, part["labels"])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def saved_and_resumed(folder: str) -> None:
    engine = start(transformers_model("Llama", 4, 2), config(3, sequence_parallel_size=2))
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(folder)
    expected = [step(engine, number) for number in (2, 3)]
    engine.destroy()
    again = start(transformers_model("Llama", 4, 2), config(3, sequence_parallel_size=2))
    again.load_checkpoint(folder)
    assert [step(again, number) for number in (2, 3)] == expected
    again.destroy()
    whole = start(transformers_model("Llama", 4, 2), config(1))
    whole.load_checkpoint(folder)
    batch = samples(2, 0)
    loss = whole(**batch).loss
    assert float(loss) == pytest.approx(expected[0], rel=1e-5)
    whole.destroy()


def test_a_checkpoint_resumes_in_parts_and_with_whole_sequences(on_ranks, tmp_path):
    on_ranks(2, saved_and_resumed, str(tmp_path))


def batch_of_ranks() -> Any:
    engine = start(plain_model(4, 4), config(2, sequence_parallel_size=2, gradient_accumulation_steps=3))
    found = (engine.batch.train, engine.batch.micro, engine.describe())
    engine.destroy()
    return found


def test_the_batch_counts_sequences(on_ranks):
    for train, micro, text in on_ranks(4, batch_of_ranks):
        assert (train, micro) == (4 * 3 * 2, 4)
        assert "on 4 ranks" in text
        assert "2 groups of 2 ranks, each of which computes one micro-batch in parts" in text


class StridedMpu:
    """Megatron's methods for sequences of the ranks 0 and 2, and 1 and 3."""

    def get_sequence_parallel_world_size(self) -> int:
        return 2

    def get_sequence_parallel_rank(self) -> int:
        return rank() // 2


def of_meshes() -> None:
    model = plain_model(4, 4)
    engine, *_ = onefold.initialize(model=model, config=config(2), mesh_param=(2, 2))
    assert (engine.sequence_parallel.size, engine.sequence_parallel.rank) == (2, rank() % 2)
    engine.destroy()
    with pytest.raises(ValueError, match=r"\(4, 2\) is not a mesh of the 4 ranks.*\(2, 2\)"):
        onefold.initialize(model=model, config=config(2), mesh_param=(4, 2))
    if rank() in (1, 2):
        with pytest.raises(ValueError, match=r"mpu: rank \d computes part"):
            onefold.initialize(model=model, config=config(2), mpu=StridedMpu())


def test_meshes_of_neighbouring_ranks(own_ranks):
    own_ranks(4, of_meshes)


@pytest.mark.parametrize("kind", ["Llama", "plain"])
def test_a_dry_run_divides_sequences(kind):
    """Check the bytes of attention, and that activations take about half."""
    length = 512

    def planned(size: int) -> Any:
        settings = config(2, sequence_parallel_size=size, train_micro_batch_size_per_gpu=MICRO)
        with torch.device("meta"):
            model = plain_model(4, 4) if kind == "plain" else transformers_model("Llama", 4, 2)
        if kind == "plain":
            model.position = torch.nn.Embedding(length, 16, device="meta")
        ids = torch.zeros(MICRO, length, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids}
        batch |= {"position_ids": ids} if kind == "plain" else {}

        def loss_of(call: Any) -> torch.Tensor:
            found = call(**batch)
            return found if isinstance(found, torch.Tensor) else found.loss

        return dry_run(model, load_config(settings), Nodes.of_size(4, 4), loss_of, vocabulary=VOCABULARY)

    whole, parts = planned(1), planned(2)
    elements = 2 * sent_elements(MICRO, length // 2, 4, 4 if kind == "plain" else 2, 4, 2)  # of two layers
    assert parts.traffic.bytes("attention") == elements * 4 * 2
    peaks = [max(moment.total for moment in found.trace.moments) for found in (whole, parts)]
    assert 0.4 < peaks[1] / peaks[0] < 0.7
