"""Chats as templates write them: exactly what the assistant says is learnt, whatever the template does with the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import processors

from brim.errors import UsageError
from tests.trainer.data.test_prepare import CHAT, TEXT, jsonl, learnt, prepared, sequences
from tests.trainer.data.tokenizers_here import CHATML, MARKED, THINKING, UNMARKED, tokenizer


def test_every_answer_of_a_chat_is_learnt_with_its_end(tmp_path: Path) -> None:
    words = tokenizer(template=CHATML)
    greeting = [{"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Well?"}]
    card = prepared(jsonl(tmp_path / "a.jsonl", {"messages": CHAT}), words)
    (row,) = sequences(card)
    assert words.decode(row["input_ids"]) == words.apply_chat_template(CHAT, tokenize=False)
    assert learnt(words, row) == "hm! A stone.</s>hm! A river.</s>"
    (row,) = sequences(prepared(jsonl(tmp_path / "b.jsonl", {"conversations": greeting}), words))
    assert learnt(words, row) == "Hello</s>Well?</s>"
    (row,) = sequences(prepared(jsonl(tmp_path / "c.jsonl", {"messages": CHAT}), words, loss_on="all"))
    assert learnt(words, row) == words.apply_chat_template(CHAT, tokenize=False)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXT, min_size=2, max_size=7))
def test_whatever_is_said_in_a_chat_exactly_the_answers_are_learnt(tmp_path: Path, contents: list[str]) -> None:
    words = tokenizer(template=CHATML)
    messages = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(contents)]
    (row,) = sequences(prepared(jsonl(tmp_path / "a.jsonl", {"messages": messages}), words))
    assert learnt(words, row) == "".join(f"{text}</s>" for text in contents[1::2])


def test_answers_are_found_where_a_template_changes_what_it_wrote(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"messages": CHAT})
    for template in (MARKED, UNMARKED):
        words = tokenizer(template=template)
        (row,) = sequences(prepared(data, words))
        assert learnt(words, row) == " A stone.</s>hm! A river.</s>"


def test_thoughts_are_learnt_where_the_template_writes_them(tmp_path: Path) -> None:
    words = tokenizer(template=THINKING)
    apart = [*CHAT[:-1], {**CHAT[-1], "reasoning_content": "Wet."}]
    inside = [CHAT[1], {"role": "assistant", "content": "<think>\nHard.\n</think>\n\nA stone."}, *CHAT[3:]]
    data = jsonl(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": apart}, {"messages": inside}, {"messages": inside[:2]})
    assert [learnt(words, row) for row in sequences(prepared(data, words))] == [
        "hm! A stone.</s>\n<think>\n\n</think>\n\nhm! A river.</s>\n",
        "hm! A stone.</s>\n<think>\nWet.\n</think>\n\nhm! A river.</s>\n",
        "A stone.</s>\n<think>\n\n</think>\n\nhm! A river.</s>\n",
        "<think>\nHard.\n</think>\n\nA stone.</s>\n",
    ]


def test_an_invitation_that_opens_thoughts_does_not_hide_the_answer(tmp_path: Path) -> None:
    words = tokenizer(template=CHATML.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}"))
    (row,) = sequences(prepared(jsonl(tmp_path / "a.jsonl", {"messages": CHAT}), words))
    assert learnt(words, row) == "hm! A stone.</s>hm! A river.</s>"


def test_a_chat_in_which_no_answer_is_found_is_a_bad_row_and_all_of_them_are_the_templates_fault(tmp_path: Path) -> None:
    shuffles = "{% for m in (messages if messages|length < 4 else messages|reverse) %}" + CHATML.partition("%}")[2]
    words = tokenizer(template=shuffles)
    data = jsonl(tmp_path / "a.jsonl", {"messages": CHAT[1:3]}, {"messages": CHAT})
    with pytest.raises(UsageError, match="a.jsonl, line 2: the chat template does not let the answers be found"):
        prepared(data, words)
    for count in (1, 150):
        data = jsonl(tmp_path / "b.jsonl", *[{"messages": CHAT}] * count)
        with pytest.raises(UsageError, match="does not let answers be told from questions") as caught:
            prepared(data, words, max_bad=1000)
        assert "--loss-on all" in (caught.value.hint or "")
    assert sequences(prepared(data, words, loss_on="all"))
    with pytest.raises(UsageError, match="line 1: the chat template refuses the messages: division by zero"):
        prepared(data, tokenizer(template="{{ 1 / 0 }}"))


@pytest.mark.parametrize("trims", [True, False], ids=["offsets without blanks", "offsets with blanks"])
def test_a_token_that_begins_with_the_blank_before_an_answer_is_learnt(tmp_path: Path, trims: bool) -> None:
    words = tokenizer(template=CHATML.replace("<|{{ m['role'] }}|>", "{{ m['role'] }}: ").replace("<|assistant|>", "assistant: "))
    words.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    chat = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "the stone"}]
    (row,) = sequences(prepared(jsonl(tmp_path / "a.jsonl", {"messages": chat}), words))
    assert words.decode(row["input_ids"]) == "user: And?</s>assistant: the stone</s>"
    assert learnt(words, row) == " the stone</s>"


def test_a_template_without_an_end_of_turn_gets_the_end_token_and_that_is_noted(tmp_path: Path) -> None:
    words = tokenizer(template=CHATML.replace("</s>", "\n"))
    data = jsonl(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT[:4]})
    card = prepared(data, words)
    assert [learnt(words, row) for row in sequences(card)] == ["hm! A stone.\nhm! A river.\n</s>", "hm! A stone.\n"]
    assert any("writes nothing behind an answer" in note for note in card.notes)
    assert prepared(data, words).notes == card.notes
    assert not prepared(data, tokenizer(template=CHATML)).notes


def test_what_a_message_says_beside_its_words_reaches_the_template(tmp_path: Path) -> None:
    words = tokenizer(template=CHATML.replace("{{ m['content'] }}", "{{ m.name or '' }}{{ m['content'] }}"))
    chat = [{**CHAT[1], "name": "Ann: "}, {**CHAT[2], "name": None, "tool_calls": None}]
    (row,) = sequences(prepared(jsonl(tmp_path / "a.jsonl", {"messages": chat, "tools": []}), words))
    assert words.decode(row["input_ids"]) == "<|user|>Ann: What is it?</s><|assistant|>hm! A stone.</s>"


def test_a_prompt_and_a_completion_of_messages_are_one_chat(tmp_path: Path) -> None:
    words = tokenizer(template=CHATML)
    data = jsonl(tmp_path / "a.jsonl", {"prompt": CHAT[:2], "completion": CHAT[2:3]})
    for columns in (None, {"source": "prompt", "target": "completion"}):
        card = prepared(data, words, columns=columns)
        assert card.columns == "prompt/completion"
        assert words.decode(sequences(card)[0]["input_ids"]) == words.apply_chat_template(CHAT[:3], tokenize=False)
