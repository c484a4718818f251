"""Secrets of command lines are masked, and nothing else is."""

from __future__ import annotations

import pytest

from brim.machine.secrets import mask_text, masked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--hub_token hf_abc --lr 1", "--hub_token *** --lr 1"),
        ("--token=X", "--token=***"),
        ("--api-key X --epochs 3", "--api-key *** --epochs 3"),
        ("--wandb-api-key=xyz", "--wandb-api-key=***"),
        ("--hfToken X", "--hfToken ***"),
        ("--key X", "--key ***"),
        ("--wandb-key 0123abcd --openai_key=X", "--wandb-key *** --openai_key=***"),
        ("--data https://host/a?X-Amz-Signature=ab12&x=1", "--data https://host/a?X-Amz-Signature=***&x=1"),
        ("--data https://host/a?sv=1&sig=ab%3D", "--data https://host/a?sv=1&sig=***"),
        ("--password --lr 1", "--password --lr 1"),
        ("env WANDB_API_KEY=abc AWS_SECRET_ACCESS_KEY=a/b+c python train.py", "env WANDB_API_KEY=*** AWS_SECRET_ACCESS_KEY=*** python train.py"),
        ("model.api_key=abc +hub.token=abc", "model.api_key=*** +hub.token=***"),
        ("--data https://me:secret@host/rows.jsonl?token=abc&x=1", "--data https://***@host/rows.jsonl?token=***&x=1"),
        ("login hf_abcdefghijklmnopqrstuvwxyz01234567", "login ***"),
        ("login sk-proj-abc123def456ghi789", "login ***"),
        ("--note ghp_0123456789abcdefABCDEF", "--note ***"),
        ("-H Authorization:abcdef", "-H Authorization:***"),
        ("--auth SECRET8 --lr 1", "--auth *** --lr 1"),
        ("--bearer SECRET8", "--bearer ***"),
        ("--cookie session=SECRET8", "--cookie ***"),
        ("--proxy-auth=SECRET8", "--proxy-auth=***"),
        ("Authorization=SECRET8", "Authorization=***"),
        ("-H X-Api-Key:SECRET8", "-H X-Api-Key:***"),
    ],
)  # fmt: skip
def test_secrets_of_a_command_line_are_masked(given: str, expected: str) -> None:
    assert masked(given.split()) == tuple(expected.split())


@pytest.mark.parametrize(
    "harmless",
    [
        "--tokenizer gpt2 --max_tokens 512 --max-new-tokens=64 --tokens_per_batch 4096 --pad_token <pad> --eos_token=</s>",
        "--text_key text --label_key=label --num-tokens 5 --token_type_ids 1 --api_key_file key.txt --secretary 1",
        "python train.py --model task-bert-base --dataset hf_dataset sk-learn /data/hf_models/x https://host/a@b:c",
        "--keys a,b --image-key x --signature f --passes 3 --lr 1e-4 batch.size=8 a:b C:\\data",
        "--auth-type basic --use-auth true --no-cookies x --cookie-jar jar.txt --author me --authors me",
    ],
)
def test_other_words_are_left_alone(harmless: str) -> None:
    assert masked(harmless.split()) == tuple(harmless.split())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cd x && HF_TOKEN=abc python train.py --api-key 'a b' --lr 1", "cd x && HF_TOKEN=*** python train.py --api-key *** --lr 1"),
        ('{"api_key": "abc", "lr": 1}', '{"api_key": ***, "lr": 1}'),
        ("curl -H 'Authorization: Bearer abcdefghij'", "curl -H 'Authorization: ***'"),
        ("curl -H Authorization: Bearer SECRET9 --lr 1", "curl -H Authorization: *** --lr 1"),
        ('curl -H "Cookie: a=SECRET1; b=SECRET2" --lr 1', 'curl -H "Cookie: ***" --lr 1'),
    ],
)  # fmt: skip
def test_secrets_inside_one_word_are_masked(given: str, expected: str) -> None:
    assert mask_text(given) == expected
    assert masked(["bash", "-c", given]) == ("bash", "-c", expected)


@pytest.mark.parametrize("option", ["--header ", "-H ", "--header=", "-H"])
@pytest.mark.parametrize(
    "header",
    ["Authorization: Bearer SECRET9", "Authorization: Token SECRET 9", "Cookie: a=SECRET1; b=SECRET2", "X-Api-Key: SECRET9", "X-Auth: SECRET9"],
)  # fmt: skip
def test_the_value_of_a_secret_header_is_masked_to_its_end(option: str, header: str) -> None:
    word, is_apart, _rest = option.partition(" ")
    shown = header.partition(":")[0] + ": ***"
    given = [word, header] if is_apart else [word + header]
    assert masked(given) == tuple([word, shown] if is_apart else [word + shown])


def test_a_harmless_header_is_left_alone() -> None:
    words = ("-H", "Content-Type: application/json; charset=utf-8", "--note", "author: somebody else")
    assert masked(words) == words
