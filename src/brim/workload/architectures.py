"""The parameters of a network below its head: one short formula per architecture.

Each formula reads a model's facts (what its config.json says) and returns how many parameters the bare body holds: the
embeddings, the blocks, the final norm. What a class puts on top (a language-model head, a pooler, a classifier) is
counted in `brim.workload.parameters`.

The formulas are written from the architectures and import neither torch nor transformers. A block is always the sum of
the same few pieces: projections (`linear`), `norm`s, an `attention` and an MLP (`mlp` or `gated_mlp`). What tells the
families apart is where they put biases and how many norms they keep, and that is all that the functions below say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brim.workload.facts import Facts


def linear(n_in: int, n_out: int, *, bias: bool = False) -> int:
    """A projection."""
    return n_in * n_out + (n_out if bias else 0)


def norm(width: int, *, bias: bool = False) -> int:
    """An RMSNorm has a weight; a LayerNorm has a bias too."""
    return 2 * width if bias else width


def attention(c: Facts, *, qkv_bias: bool = False, out_bias: bool = False) -> int:
    """Grouped-query attention; with as many key-value heads as heads it is multi-head attention."""
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return linear(c.width, queries + 2 * keys, bias=qkv_bias) + linear(queries, c.width, bias=out_bias)


def mlp(width: int, inner: int, *, bias: bool = True) -> int:
    """Up and down."""
    return linear(width, inner, bias=bias) + linear(inner, width, bias=bias)


def gated_mlp(width: int, inner: int, *, bias: bool = False) -> int:
    """Up, down, and a gate as wide as the way up."""
    return linear(width, inner, bias=bias) + mlp(width, inner, bias=bias)


def stack_of(c: Facts, block: int, *, final_norm: int) -> int:
    """An embedding, equal blocks, a final norm."""
    return c.vocabulary * c.width + c.layers * block + final_norm


def rotary_decoder(
    c: Facts, *, qkv_bias: bool = False, out_bias: bool = False, mlp_bias: bool = False, norms: int = 2, extra: int = 0
) -> int:
    """The shape that Llama made common: RMSNorms, rotary positions, a gated MLP. `extra` is what else a block holds."""
    block = attention(c, qkv_bias=qkv_bias, out_bias=out_bias) + gated_mlp(c.width, c.inner, bias=mlp_bias)
    return stack_of(c, block + norms * norm(c.width) + extra, final_norm=norm(c.width))


def llama(c: Facts) -> int:
    """Llama, Granite and SmolLM3: biases where the config asks for them."""
    bias = c.flag("attention_bias", default=False)
    return rotary_decoder(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias", default=False))


def mistral(c: Facts) -> int:
    """Mistral and Phi-3 have no biases at all."""
    return rotary_decoder(c)


def qwen2(c: Facts) -> int:
    """A bias on queries, keys and values, always."""
    return rotary_decoder(c, qkv_bias=True)


def gemma(c: Facts, *, norms: int = 2, extra: int = 0) -> int:
    """Biases in the attention where the config asks for them, never in the MLP."""
    bias = c.flag("attention_bias", default=False)
    return rotary_decoder(c, qkv_bias=bias, out_bias=bias, norms=norms, extra=extra)


def gemma2(c: Facts) -> int:
    """A norm before and after the attention, and before and after the MLP."""
    return gemma(c, norms=4)


def gemma3_text(c: Facts) -> int:
    """Gemma 2 with Qwen 3's norms on queries and keys."""
    return gemma(c, norms=4, extra=2 * norm(c.head_dim))


def qwen3(c: Facts) -> int:
    """A norm on each head's queries and one on its keys, shared by the heads."""
    return gemma(c, extra=2 * norm(c.head_dim))


def olmo(c: Facts) -> int:
    """Norms without a weight or a bias."""
    return gemma(c, norms=0) - norm(c.width)


def olmo2(c: Facts) -> int:
    """A norm on all queries together and one on all keys."""
    return gemma(c, extra=norm(c.heads * c.head_dim) + norm(c.kv_heads * c.head_dim))


def glm(c: Facts, *, norms: int = 2) -> int:
    """A bias on queries, keys and values, never on the output."""
    return rotary_decoder(c, qkv_bias=c.flag("attention_bias", default=True), norms=norms)


def glm4(c: Facts) -> int:
    """A norm before and after the attention, and before and after the MLP."""
    return glm(c, norms=4)


def stablelm(c: Facts) -> int:
    """LayerNorms with a bias; a parallel residual needs one of them, a norm on queries and keys adds one per head."""
    block = attention(c, qkv_bias=c.flag("use_qkv_bias", default=False)) + gated_mlp(c.width, c.inner)
    block += norm(c.width, bias=True) * (1 if c.flag("use_parallel_residual", default=False) else 2)
    if c.flag("qk_layernorm", default=False):
        block += norm((c.heads + c.kv_heads) * c.head_dim)
    return stack_of(c, block, final_norm=norm(c.width, bias=True))


def experts(c: Facts, count: int, inner: int) -> int:
    """A mixture: a router and `count` gated MLPs. All of them are parameters, however few a token visits."""
    return linear(c.width, count) + count * gated_mlp(c.width, inner)


def mixtral(c: Facts) -> int:
    """Mistral with a mixture in every block."""
    block = attention(c) + experts(c, c.size("num_local_experts", "num_experts"), c.inner) + 2 * norm(c.width)
    return stack_of(c, block, final_norm=norm(c.width))


def qwen3_moe(c: Facts) -> int:
    """Every `decoder_sparse_step`-th block holds a mixture, except those named in `mlp_only_layers`."""
    bias = c.flag("attention_bias", default=False)
    block = attention(c, qkv_bias=bias, out_bias=bias) + 2 * norm(c.head_dim) + 2 * norm(c.width)
    step, dense_layers = c.size("decoder_sparse_step", default=1), c.integers("mlp_only_layers")
    sparse = sum(1 for i in range(c.layers) if i not in dense_layers and (i + 1) % step == 0)
    mixture = experts(c, c.size("num_experts", "num_local_experts"), c.size("moe_intermediate_size")) if sparse else 0
    dense = gated_mlp(c.width, c.inner) if sparse < c.layers else 0
    return stack_of(c, block, final_norm=norm(c.width)) + sparse * mixture + (c.layers - sparse) * dense


def gpt_oss(c: Facts) -> int:
    """A mixture with biases everywhere, and a learned attention sink for each head."""
    bias = c.flag("attention_bias", default=True)
    count = c.size("num_local_experts", "num_experts")
    block = attention(c, qkv_bias=bias, out_bias=bias) + c.heads + 2 * norm(c.width)
    block += linear(c.width, count, bias=True) + count * gated_mlp(c.width, c.inner, bias=True)
    return stack_of(c, block, final_norm=norm(c.width))


def gpt_block(c: Facts, inner: int, *, norms: int = 2, qkv_bias: bool = True, out_bias: bool = True) -> int:
    """The older kind of block: LayerNorms and an MLP with biases. Attention and MLP side by side need one norm only."""
    block = attention(c, qkv_bias=qkv_bias, out_bias=out_bias) + norms * norm(c.width, bias=True)
    return block + mlp(c.width, inner)


def gpt2(c: Facts) -> int:
    """Learned positions, biases everywhere."""
    body = stack_of(c, gpt_block(c, c.size("n_inner", default=4 * c.width)), final_norm=norm(c.width, bias=True))
    return body + c.size("n_positions", "n_ctx") * c.width


def gpt_neo(c: Facts) -> int:
    """GPT-2 without a bias on queries, keys and values."""
    block = gpt_block(c, c.size("intermediate_size", default=4 * c.width), qkv_bias=False)
    return stack_of(c, block, final_norm=norm(c.width, bias=True)) + c.positions * c.width


def gptj(c: Facts) -> int:
    """GPT-J and CodeGen: attention and MLP side by side behind one norm."""
    block = gpt_block(c, c.size("n_inner", default=4 * c.width), norms=1, qkv_bias=False, out_bias=False)
    return stack_of(c, block, final_norm=norm(c.width, bias=True))


def gpt_neox(c: Facts) -> int:
    """GPT-NeoX and Pythia: rotary positions; two norms even where attention and MLP are side by side."""
    bias = c.flag("attention_bias", default=True)
    block = gpt_block(c, c.inner, qkv_bias=bias, out_bias=bias)
    return stack_of(c, block, final_norm=norm(c.width, bias=True))


def phi(c: Facts) -> int:
    """Phi-1.5 and Phi-2: behind one norm, with rotary positions."""
    block = gpt_block(c, c.inner, norms=1)
    if c.flag("qk_layernorm", default=False):
        block += 2 * norm(c.width // c.heads, bias=True)
    return stack_of(c, block, final_norm=norm(c.width, bias=True))


def starcoder2(c: Facts) -> int:
    """Rotary positions and grouped queries in the older kind of block; `use_bias` is for all of it."""
    bias = c.flag("use_bias", default=True)
    block = attention(c, qkv_bias=bias, out_bias=bias) + 2 * norm(c.width, bias=True) + mlp(c.width, c.inner, bias=bias)
    return stack_of(c, block, final_norm=norm(c.width, bias=True))


def xglm(c: Facts) -> int:
    """Its sinusoidal positions are a buffer."""
    return stack_of(c, gpt_block(c, c.inner), final_norm=norm(c.width, bias=True))


def bloom(c: Facts) -> int:
    """ALiBi instead of a position table, and a norm right behind the embedding."""
    return stack_of(c, gpt_block(c, 4 * c.width), final_norm=norm(c.width, bias=True)) + norm(c.width, bias=True)


def opt(c: Facts) -> int:
    """Two spare rows in the position table. OPT-350m embeds narrower than it computes, and has no final norm."""
    bias, affine = c.flag("enable_bias", default=True), c.flag("layer_norm_elementwise_affine", default=True)
    layer_norm = norm(c.width, bias=True) if affine else 0
    narrow = c.size("word_embed_proj_dim", default=c.width)
    block = attention(c, qkv_bias=bias, out_bias=bias) + mlp(c.width, c.inner, bias=bias) + 2 * layer_norm
    before, removed = c.flag("do_layer_norm_before", default=True), c.flag("_remove_final_layer_norm", default=False)
    projections = 2 * linear(narrow, c.width) if narrow != c.width else 0
    embeddings = c.vocabulary * narrow + (c.positions + 2) * c.width + projections
    return embeddings + c.layers * block + (layer_norm if before and not removed else 0)


def falcon(c: Facts) -> int:
    """Three generations: many heads with ALiBi (rw), one key-value head (7b), grouped heads with two norms (40b)."""
    bias, new = c.flag("bias", default=False), c.flag("new_decoder_architecture", default=False)
    if new:
        kv_heads = c.size("num_kv_heads", default=c.heads)
        norms = c.size("num_ln_in_parallel_attn", default=2)
    else:
        kv_heads = 1 if c.flag("multi_query", default=True) else c.heads
        norms = 1 if c.flag("parallel_attn", default=True) else 2
    keys = kv_heads * (c.width // c.heads)
    block = linear(c.width, c.width + 2 * keys, bias=bias) + linear(c.width, c.width, bias=bias)
    block += norms * norm(c.width, bias=True) + mlp(c.width, c.size("ffn_hidden_size", default=4 * c.width), bias=bias)
    return stack_of(c, block, final_norm=norm(c.width, bias=True))


def bert(c: Facts) -> int:
    """BERT, RoBERTa and XLM-R: tables for words, positions and segments, one norm over their sum, then blocks."""
    tables = c.vocabulary + c.positions + c.size("type_vocab_size", default=2)
    return tables * c.width + norm(c.width, bias=True) + c.layers * gpt_block(c, c.inner)


def distilbert(c: Facts) -> int:
    """BERT without segments. Its sinusoidal positions, where it has them, are learned on."""
    return (c.vocabulary + c.positions) * c.width + norm(c.width, bias=True) + c.layers * gpt_block(c, c.inner)


def electra(c: Facts) -> int:
    """BERT whose tables may be narrower than its blocks."""
    narrow = c.size("embedding_size", default=128)
    tables = c.vocabulary + c.positions + c.size("type_vocab_size", default=2)
    projection = linear(narrow, c.width, bias=True) if narrow != c.width else 0
    return tables * narrow + norm(narrow, bias=True) + projection + c.layers * gpt_block(c, c.inner)


def albert(c: Facts) -> int:
    """Narrow tables, always projected; and all layers of a group are the same weights."""
    narrow = c.size("embedding_size")
    tables = c.vocabulary + c.positions + c.size("type_vocab_size", default=2)
    distinct = c.size("num_hidden_groups", default=1) * c.size("inner_group_num", default=1)
    embeddings = tables * narrow + norm(narrow, bias=True) + linear(narrow, c.width, bias=True)
    return embeddings + distinct * gpt_block(c, c.inner)


def deberta_embeddings(c: Facts) -> int:
    """Words, positions only where the input is biased by them, segments only where there are any."""
    narrow = c.size("embedding_size", default=c.width)
    tables = c.vocabulary + c.size("type_vocab_size", default=0)
    tables += c.positions if c.flag("position_biased_input", default=True) else 0
    return tables * narrow + (linear(narrow, c.width) if narrow != c.width else 0) + norm(c.width, bias=True)


def reach(c: Facts) -> int:
    """How far apart two tokens may be before DeBERTa takes them for equally far; the table has rows for either side."""
    positions = c.size("max_relative_positions", default=-1, least=-1)
    return positions if positions > 0 else c.positions


def deberta(c: Facts) -> int:
    """Version 1: a bias on queries and values, none on keys, and projections of its own for relative positions."""
    square, kinds = linear(c.width, c.width), c.words("pos_att_type")
    block = 3 * square + 2 * c.width + linear(c.width, c.width, bias=True)
    block += 2 * norm(c.width, bias=True) + mlp(c.width, c.inner)
    if not c.flag("relative_attention", default=False):
        return deberta_embeddings(c) + c.layers * block
    block += (square if "c2p" in kinds else 0) + (square + c.width if "p2c" in kinds else 0)
    return deberta_embeddings(c) + c.layers * block + 2 * reach(c) * c.width


def deberta_v2(c: Facts) -> int:
    """Versions 2 and 3: BERT's blocks; relative positions may share their projections; version 2 adds a convolution."""
    square = linear(c.width, c.width, bias=True)
    body = deberta_embeddings(c) + c.layers * gpt_block(c, c.inner)
    if c.flag("relative_attention", default=False):
        kinds = [] if c.flag("share_att_key", default=False) else c.words("pos_att_type")
        buckets = c.size("position_buckets", default=-1)
        body += c.layers * square * sum(kind in kinds for kind in ("c2p", "p2c"))
        body += 2 * (buckets if buckets > 0 else reach(c)) * c.width
    body += norm(c.width, bias=True) if "layer_norm" in c.words("norm_rel_ebd") else 0
    kernel = c.size("conv_kernel_size", default=0)
    convolution = kernel * c.width * c.width // c.size("conv_groups", default=1) + c.width + norm(c.width, bias=True)
    return body + (convolution if kernel > 0 else 0)


def modernbert(c: Facts) -> int:
    """Gated MLPs, rotary positions; the first block has no norm before its attention, for the embedding has one."""
    attention_bias, norm_bias = c.flag("attention_bias", default=False), c.flag("norm_bias", default=False)
    block = attention(c, qkv_bias=attention_bias, out_bias=attention_bias) + 2 * norm(c.width, bias=norm_bias)
    block += gated_mlp(c.width, c.inner, bias=c.flag("mlp_bias", default=False))
    return stack_of(c, block, final_norm=norm(c.width, bias=norm_bias))


def t5(c: Facts) -> int:
    """One table for both sides, no biases; each side's first block holds the relative positions of all its blocks."""
    inner = c.heads * c.size("d_kv")
    self_attention = 4 * linear(c.width, inner) + norm(c.width)
    activation = c.words("feed_forward_proj") or ["gated-gelu" if c.model_type == "mt5" else "relu"]
    gated = activation[0].startswith("gated")
    forward = (gated_mlp(c.width, c.inner) if gated else mlp(c.width, c.inner, bias=False)) + norm(c.width)
    encoders = c.size("num_layers")
    decoders = c.size("num_decoder_layers", default=encoders)
    blocks = encoders * (self_attention + forward) + decoders * (2 * self_attention + forward)
    sides = 2 * (c.size("relative_attention_num_buckets", default=32) * c.heads + norm(c.width))
    return c.vocabulary * c.width + blocks + sides


def bart(c: Facts, *, positions: int | None = None, norms_outside: int = 2) -> int:
    """BART and its kin: they differ in their position tables and in the norms outside their blocks.

    Where words are not tied, the shared table, the encoder's and the decoder's are three.
    """
    width, layer_norm = c.width, norm(c.width, bias=True)
    attends = 4 * linear(width, width, bias=True) + layer_norm
    encoder = attends + mlp(width, c.size("encoder_ffn_dim")) + layer_norm
    decoder = 2 * attends + mlp(width, c.size("decoder_ffn_dim")) + layer_norm
    words = c.vocabulary * width * (1 if c.flag("tie_word_embeddings", default=True) else 3)
    rows = 2 * (c.positions + 2 if positions is None else positions)
    blocks = c.size("encoder_layers") * encoder + c.size("decoder_layers") * decoder
    return words + rows * width + blocks + norms_outside * layer_norm


def mbart(c: Facts) -> int:
    """A norm behind each side's embedding, and a final one on each side."""
    return bart(c, norms_outside=4)


def pegasus(c: Facts) -> int:
    """Sinusoidal positions, kept as parameters that are never trained; a final norm on each side."""
    return bart(c, positions=c.positions)


def marian(c: Facts) -> int:
    """Sinusoidal positions, kept as parameters that are never trained; no norm outside the blocks."""
    return bart(c, positions=c.positions, norms_outside=0)


def m2m_100(c: Facts) -> int:
    """M2M-100 and NLLB: sinusoidal positions in a buffer; a final norm on each side."""
    return bart(c, positions=0)
