"""Keys that Arrow adds to objects of other rows are not read, and turns with weight 0 are not trained."""

import json

import datasets
import pytest
from pyarrow.parquet import write_table as write_parquet

from openppo.config import RowsConfig
from openppo.datasets import load_mixed_rows, sources
from tests.unit.datasets.loaders import WITH_CHAT, load, shown, turns

NUMBER, TEXT = {"type": "integer"}, {"type": "string", "enum": ["Paris"]}


def calling(name, arguments, properties, more):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": name, "parameters": parameters, **more}}
    messages = [*turns(user="go"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": [*messages, *turns(tool="ok", assistant="Done.")], "tools": [tool]}


ROWS = [
    calling("move", {"x": 0, "to": [{"y": 1}]}, {"x": NUMBER}, {}),
    calling(
        "weather",
        {"city": "Paris", "to": [{"z": 2}]},
        {"city": TEXT},
        {"description": "d", "strict": True},
    ),
]


@pytest.fixture(params=["parquet", "saved", "hub", "dataset_class"])
def rows(request, tmp_path, monkeypatch):
    """``ROWS`` after Arrow, from each place where it is read."""
    data, options, source = datasets.Dataset.from_list(ROWS), RowsConfig(), str(tmp_path / "rows")
    if request.param == "parquet":
        source += ".parquet"
        write_parquet(data.data.table, source)
    elif request.param == "saved":
        data.save_to_disk(source)
    elif request.param == "hub":
        source = "owner/name"
        monkeypatch.setattr(sources, "load_dataset", lambda *_, **__: data)
    else:
        data.to_parquet(source)
        (tmp_path / "own.py").write_text(
            "from datasets import Dataset\nrows = Dataset.from_parquet\n"
        )
        options = RowsConfig(dataset_class=f"{tmp_path}/own.py:rows")
    return [
        row.row for row in load_mixed_rows(options, source, flag="--dataset", split="train", seed=0)
    ]


def contents(rows):
    calls = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in rows]
    return calls, [row["tools"] for row in rows]


def test_arguments_and_properties_have_the_keys_that_were_written(rows):
    assert contents(rows) == contents(ROWS)


def test_null_in_json_and_outside_arguments_stays(tmp_path):
    row = calling("move", {"x": None}, {"x": None}, {}) | {
        "arguments": {"a": None},
        "properties": None,
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    rows = load_mixed_rows(
        RowsConfig(), str(tmp_path / "rows.jsonl"), flag="--dataset", split="train", seed=0
    )
    assert rows[0].row == row
    plain = [
        {
            "arguments": {"a": None, "b": 1},
            "properties": None,
            "messages": [{"role": "user", "content": None}],
        }
    ]
    datasets.Dataset.from_list(plain).to_parquet(tmp_path / "rows.parquet")
    rows = load_mixed_rows(
        RowsConfig(), str(tmp_path / "rows.parquet"), flag="--dataset", split="train", seed=0
    )
    assert [row.row for row in rows] == plain  # columns of the user's own


def marked(mark, first, second):
    """Two answers with these values of ``mark``, None for none."""
    chat = [*turns(user="a", assistant="b"), *turns(user="c"), *turns(assistant="d")]
    for message, value in ((chat[1], first), (chat[3], second)):
        if value is not None:
            message[mark] = value
    return chat


START, LAST = "<bos><user>a<eos>\n<assistant>", "\n<user>c<eos>\n<assistant>"


@pytest.mark.parametrize("mark", ["weight", "train", "trainable", "loss_mask"])
def test_a_turn_with_weight_0_is_not_trained(tokenizer, mark):
    for off in (0, False, 0.0):
        for on in (None, 1, True):
            (example,) = load("sft", [{"messages": marked(mark, off, on)}], tokenizer, **WITH_CHAT)
            assert shown(example, tokenizer) == START + "b<eos>" + LAST + "«d<eos>»"
            (example,) = load("sft", [{"messages": marked(mark, on, off)}], tokenizer, **WITH_CHAT)
            assert shown(example, tokenizer) == START + "«b<eos>»"
    row = {"prompt": turns(user="a"), "response": marked(mark, 0, 1)[1:]}
    (example,) = load("sft", [row], tokenizer, **WITH_CHAT)
    assert shown(example, tokenizer) == START + "b<eos>" + LAST + "«d<eos>»"
    named = [{"user": "human", "assistant": "gpt"}[turn["role"]] for turn in marked(mark, 0, 1)]
    chat = [
        {"from": name, "value": turn["content"], **turn}
        for name, turn in zip(named, marked(mark, 0, 1), strict=True)
    ]
    (example,) = load("sft", [{"conversations": chat}], tokenizer, **WITH_CHAT)
    assert shown(example, tokenizer) == START + "b<eos>" + LAST + "«d<eos>»"
    with pytest.raises(
        ValueError, match="^--dataset, row 1 of file: no turn of the assistant to train on"
    ):
        load("sft", [{"messages": marked(mark, 0, 0)}], tokenizer, **WITH_CHAT)
    for value in (0.5, "0", [1, 0]):
        with pytest.raises(
            ValueError, match=f"row 1 of file: {mark!r} of turn 2 is neither 0 nor 1"
        ):
            load("sft", [{"messages": marked(mark, value, 1)}], tokenizer, **WITH_CHAT)


def test_reward_models_and_prompts_read_turns_with_weight_0(tokenizer):
    whole, other = marked("weight", 1, 0), marked("weight", 1, 0)
    other[3]["content"] = "e"
    (pair,) = load("pairs", [{"chosen": whole, "rejected": other}], tokenizer, **WITH_CHAT)
    expected = [START + "b<eos>" + LAST + f"{side}<eos>" for side in "de"]
    assert [tokenizer.decode(ids) for ids in pair.texts] == expected
    named = {"chosen_key": "x", "rejected_key": "y"}
    (pair,) = load("pairs", [{"x": whole, "y": other}], tokenizer, named, **WITH_CHAT)
    assert [tokenizer.decode(ids) for ids in pair.texts] == expected
    (prompt,) = load("prompts", [{"messages": whole[:3]}], tokenizer, **WITH_CHAT)
    assert prompt.text == START + "b<eos>" + LAST
