"""Makes what lies beside this file: `python -m brim.workload.embedded.making`. Written once, shipped, and made again only on purpose.

Rows are drawn from small families of questions in English and Chinese: sums, units, words, days, sorting, and short explanations of what
brim is about. Most are short and a few are long, as in real instruction data, so that slicing by length has something to do.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Pair = tuple[str, str]

ROWS: Final = 480
VOCABULARY: Final = 1600
FOLDER: Final = Path(__file__).parent

_WORDS: Final = (
    ("water", "水"), ("fire", "火"), ("mountain", "山"), ("river", "河"), ("sun", "太阳"), ("moon", "月亮"), ("star", "星星"),
    ("rain", "雨"), ("snow", "雪"), ("wind", "风"), ("tree", "树"), ("flower", "花"), ("bird", "鸟"), ("fish", "鱼"), ("horse", "马"),
    ("cat", "猫"), ("dog", "狗"), ("book", "书"), ("paper", "纸"), ("pen", "笔"), ("door", "门"), ("window", "窗户"), ("table", "桌子"),
    ("chair", "椅子"), ("bread", "面包"), ("rice", "米饭"), ("tea", "茶"), ("milk", "牛奶"), ("apple", "苹果"), ("pear", "梨"),
    ("red", "红色"), ("green", "绿色"), ("blue", "蓝色"), ("white", "白色"), ("black", "黑色"), ("memory", "内存"), ("batch", "批次"),
    ("gradient", "梯度"), ("model", "模型"), ("loss", "损失"),
)  # fmt: skip
_OPPOSITES: Final = (
    ("hot", "cold"), ("big", "small"), ("long", "short"), ("fast", "slow"), ("full", "empty"), ("early", "late"), ("open", "closed"),
    ("heavy", "light"), ("dry", "wet"), ("old", "new"), ("high", "low"), ("near", "far"),
)  # fmt: skip
_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ZH_DAYS: Final = ("星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日")
_MONTHS: Final = (
    ("January", 31), ("March", 31), ("April", 30), ("May", 31), ("June", 30), ("July", 31), ("August", 31), ("September", 30),
    ("October", 31), ("November", 30), ("December", 31),
)  # fmt: skip
_UNITS: Final = (
    ("kilometres", "metres", "公里", "米", 1000), ("metres", "centimetres", "米", "厘米", 100), ("kilograms", "grams", "千克", "克", 1000),
    ("hours", "minutes", "小时", "分钟", 60), ("minutes", "seconds", "分钟", "秒", 60), ("days", "hours", "天", "小时", 24),
    ("GiB", "MiB", "GiB", "MiB", 1024), ("weeks", "days", "周", "天", 7),
)  # fmt: skip
_FRUIT: Final = ("fig", "kiwi", "lime", "plum", "pear", "apple", "grape", "lemon", "mango", "melon", "olive", "peach")
_TOLD: Final = (
    (
        "What is a batch?",
        "A batch is the group of examples whose gradients are added up before the weights change once.",
        "什么是批次？",
        "批次是一组样本，它们的梯度相加之后，权重才更新一次。",
    ),
    (
        "What is a micro-batch?",
        "A micro-batch is the part of a batch that is on the device at one time. Several of them make one step.",
        "什么是微批次？",
        "微批次是批次中同时放在设备上的那一部分，几个微批次合成一步。",
    ),
    (
        "What is a gradient?",
        "A gradient says for every weight in which direction, and how steeply, the loss would grow.",
        "什么是梯度？",
        "梯度说明每个权重朝哪个方向变化会让损失增大，以及增大得有多快。",
    ),
    (
        "What is padding?",
        "Padding fills short rows up to the length of the longest one. It is computed and then thrown away.",
        "什么是填充？",
        "填充把短的行补到最长一行的长度，这部分会被计算，然后丢弃。",
    ),
    (
        "What takes memory in training?",
        (
            "Four things take memory: the weights, their gradients, the state of the optimizer, and the activations that "
            "wait for the backward pass. The first three stay the same from step to step. The activations grow with the rows "
            "of the micro-batch and with their length, so they decide how many rows fit."
        ),
        "训练时什么占用内存？",
        (
            "四样东西占用内存：权重、权重的梯度、优化器的状态，以及等待反向传播的激活值。前三样每一步都一样大。激活值随着微批"
            "次的行数和长度增长，所以它们决定能放下多少行。"
        ),
    ),
    (
        "Why do we accumulate gradients?",
        (
            "Because the batch that is good for learning may be larger than the memory. The batch is cut into micro-batches, "
            "each one adds its gradient to the sum, and the optimizer steps once at the end. If the sum is divided by the "
            "number of tokens of the whole batch, the step is the same as if everything had fitted at once."
        ),
        "为什么要累积梯度？",
        (
            "因为适合学习的批次可能比内存大。把批次切成微批次，每个微批次把自己的梯度加到总和里，最后优化器只走一步。只要总和"
            "除以整个批次的词元数，这一步就和一次全部放下时相同。"
        ),
    ),
    (
        "What happens when memory runs out?",
        (
            "The allocator refuses the request and the step stops in the middle. Nothing is lost if the weights have not "
            "changed yet: the gradients are cleared, the micro-batch is cut in two, and the same batch is computed again in "
            "smaller parts. The optimizer never sees the difference."
        ),
        "内存用完时会发生什么？",
        (
            "分配器拒绝请求，这一步停在中间。只要权重还没有改变，就什么也没有丢失：清空梯度，把微批次切成两半，再用更小的部分"
            "重新计算同一个批次。优化器看不出区别。"
        ),
    ),
    (
        "Why sort rows by length?",
        (
            "Rows of one length need no padding. If long rows stand with long ones and short rows with short ones, the "
            "device computes fewer empty places, and more rows fit beside each other. Sorting is done inside one batch only, "
            "so that every step still sees a fair sample of the data."
        ),
        "为什么按长度排序？",
        (
            "长度相同的行不需要填充。长的和长的放在一起，短的和短的放在一起，设备就少计算空的位置，也能同时放下更多行。排序只"
            "在一个批次之内进行，所以每一步看到的仍然是公平的样本。"
        ),
    ),
)
_ASKED: Final = (
    ("{}", "{}"),
    ("Please explain. {}", "请解释：{}"),
    ("In a few words: {}", "用几句话回答：{}"),
    ("A beginner asks: {}", "初学者问：{}"),
)


def rows(seed: int = 0) -> Iterator[Pair]:
    """The questions and answers, the same for the same seed."""
    draw = random.Random(seed)  # noqa: S311 (data for a demonstration)
    families: tuple[tuple[Callable[[random.Random], Pair], int], ...] = (
        (_sum, 16), (_unit, 12), (_word, 14), (_opposite, 5), (_day, 9), (_month, 5), (_sorted, 12), (_told, 14), (_table, 5), (_count, 8),
    )  # fmt: skip
    makers, weights = zip(*families, strict=True)
    known: set[Pair] = set()
    while len(known) < ROWS:
        (maker,) = draw.choices(makers, weights)
        pair = maker(draw)
        # No row twice: one that is held out for evaluation is not learnt under another number.
        if pair not in known:
            known.add(pair)
            yield pair


def _sum(draw: random.Random) -> Pair:
    one, other = draw.randint(2, 60), draw.randint(2, 40)
    sign, answer = draw.choice((("+", one + other), ("-", one - other), ("x", one * other)))
    asked = f"{one} {sign} {other}"
    return draw.choice(
        ((f"What is {asked}?", f"{asked} = {answer}"), (f"计算 {asked}。", f"{asked} = {answer}")),
    )


def _unit(draw: random.Random) -> Pair:
    large, small, zh_large, zh_small, factor = draw.choice(_UNITS)
    count = draw.randint(2, 12)
    return draw.choice(
        (
            (f"How many {small} are {count} {large}?", f"{count} {large} are {count * factor} {small}."),
            (f"{count} {zh_large}等于多少{zh_small}？", f"{count} {zh_large}等于 {count * factor} {zh_small}。"),
        )
    )


def _word(draw: random.Random) -> Pair:
    english, chinese = draw.choice(_WORDS)
    return draw.choice(((f"What is {english} in Chinese?", chinese), (f"“{chinese}”用英语怎么说？", english)))


def _opposite(draw: random.Random) -> Pair:
    pair = draw.choice(_OPPOSITES)
    one, other = pair if draw.random() < 0.5 else pair[::-1]
    return f"What is the opposite of {one}?", f"The opposite of {one} is {other}."


def _day(draw: random.Random) -> Pair:
    place, ahead = draw.randrange(7), draw.randint(1, 6)
    then = (place + ahead) % 7
    return draw.choice(
        (
            (f"Today is {_DAYS[place]}. What day is it in {ahead} days?", f"In {ahead} days it is {_DAYS[then]}."),
            (f"今天是{_ZH_DAYS[place]}，{ahead} 天后是星期几？", f"{ahead} 天后是{_ZH_DAYS[then]}。"),
        )
    )


def _month(draw: random.Random) -> Pair:
    month, days = draw.choice(_MONTHS)
    return f"How many days has {month}?", f"{month} has {days} days."


def _sorted(draw: random.Random) -> Pair:
    if draw.random() < 0.4:
        words = draw.sample(_FRUIT, draw.randint(3, 12))
        return f"Sort by the alphabet: {', '.join(words)}", ", ".join(sorted(words))
    # Long lists are rare: the number of numbers falls off as lengths of real rows do.
    numbers = [draw.randint(1, 99) for _place in range(min(44, 3 + int(draw.expovariate(1 / 10))))]
    text, answer = ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers)))
    return draw.choice(((f"Sort: {text}", answer), (f"从小到大排列：{text}", answer)))


def _told(draw: random.Random) -> Pair:
    question, answer, zh_question, zh_answer = draw.choice(_TOLD)
    place = draw.randrange(len(_ASKED))
    asked, zh_asked = _ASKED[place]
    return draw.choice(((asked.format(question), answer), (zh_asked.format(zh_question), zh_answer)))


def _table(draw: random.Random) -> Pair:
    factor, lines = draw.randint(2, 12), draw.randint(6, 20)
    answer = "\n".join(f"{factor} x {place} = {factor * place}" for place in range(1, lines + 1))
    return draw.choice(
        ((f"Write {lines} lines of the table of {factor}.", answer), (f"写出 {factor} 的乘法表，共 {lines} 行。", answer)),
    )


def _count(draw: random.Random) -> Pair:
    first, apart, many = draw.randint(1, 20), draw.randint(1, 5), 5 + int(draw.expovariate(1 / 14))
    answer = ", ".join(str(first + apart * place) for place in range(min(many, 62)))
    last = first + apart * (min(many, 62) - 1)
    return draw.choice(
        (
            (f"Count from {first} to {last} in steps of {apart}.", answer),
            (f"从 {first} 数到 {last}，每次加 {apart}。", answer),
        )
    )


def data_text(seed: int = 0) -> str:
    """The data file: one JSON object a line."""
    lines = (json.dumps({"prompt": prompt, "response": response}, ensure_ascii=False) for prompt, response in rows(seed))
    return "".join(f"{each}\n" for each in lines)


def _tokenizer_text() -> str:
    """A byte-level BPE, trained on the rows: any text can be written with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in rows() for text in pair), trainer)
    return tokenizer.to_str(pretty=False)


def main() -> None:
    """Write the data and the tokenizer."""
    (FOLDER / "data.jsonl").write_text(data_text(), encoding="utf-8")
    (FOLDER / "tokenizer.json").write_text(_tokenizer_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
