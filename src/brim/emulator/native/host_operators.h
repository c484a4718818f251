// Operators of the card that have no kernel for the CPU, computed on the host from others: attention, dropout, RMS norm, cuDNN.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <cmath>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

namespace host {

// State of the card's random number generator before the operator ran. Equal states give equal numbers.
struct Philox {
  uint64_t seed = 0, offset = 0;

  at::Generator generator(uint64_t stream = 0) const {
    uint64_t mixed = seed;
    for (uint64_t part : {offset, stream}) {  // splitmix64: neighbouring states must not give similar numbers
      mixed += 0x9E3779B97F4A7C15ull + part;
      mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
      mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
      mixed ^= mixed >> 31;
    }
    return at::detail::createCPUGenerator(mixed);
  }
};

// The arguments are on the host, with half precision widened to float. `results` are those of the card; only their shapes and types are used here.
struct Call {
  const c10::FunctionSchema& schema;
  const torch::jit::Stack& arguments;
  const std::vector<c10::IValue>& results;
  Philox philox;

  const c10::IValue& operator[](const char* name) const {
    static const c10::IValue none;
    for (size_t i = 0; i < schema.arguments().size(); i++)
      if (schema.arguments()[i].name() == name) return arguments[i];
    return none;
  }
  at::Tensor tensor(const char* name) const {
    const c10::IValue& value = (*this)[name];
    return value.isTensor() ? value.toTensor() : at::Tensor();
  }
  int64_t integer(const char* name, int64_t otherwise) const {
    const c10::IValue& value = (*this)[name];
    return value.isInt() ? value.toInt() : otherwise;
  }
  double number(const char* name, double otherwise) const {
    const c10::IValue& value = (*this)[name];
    return value.isDouble() ? value.toDouble() : otherwise;
  }
  bool flag(const char* name) const { return (*this)[name].isBool() && (*this)[name].toBool(); }
};

// An undefined result leaves the card's result unchanged.
using Results = std::vector<at::Tensor>;
using Decomposition = Results (*)(const Call&);

// ---- attention: one sequence at a time, with the full matrix of weights
struct Attention {
  at::Tensor query, key, value, bias, query_starts, key_starts;
  double scale = 1, dropout = 0;
  int64_t left = -1, right = -1;  // sizes of the window; -1: unlimited
  bool from_end = false;          // the last query is aligned with the last key, not the first with the first
  bool heads_first = false;
  Philox philox;

  bool packed() const { return query_starts.defined() && query_starts.numel() > 0; }
  int64_t count() const { return packed() ? query_starts.numel() - 1 : query.size(0); }

  // One sequence as [heads, length, width], from a tensor with the layout of query or key
  at::Tensor sequence(const at::Tensor& t, int64_t i, bool of_key) const {
    if (packed()) {
      const int32_t* starts = (of_key ? key_starts : query_starts).const_data_ptr<int32_t>();
      at::Tensor flat = t.dim() == 4 ? t.squeeze(0) : t;
      return flat.slice(0, starts[i], starts[i + 1]).transpose(0, 1);
    }
    return heads_first ? t.select(0, i) : t.select(0, i).transpose(0, 1);
  }
  at::Tensor repeated(const at::Tensor& of_key) const {
    int64_t groups = heads() / of_key.size(0);
    return groups == 1 ? of_key : of_key.repeat_interleave(groups, 0);
  }
  int64_t heads() const { return heads_first ? query.size(1) : query.size(-2); }
};

struct Weights {
  at::Tensor probabilities, dropped, logsumexp;  // dropped: the probabilities that reach the output
  at::Tensor kept;                               // 1/(1-p) where kept, 0 where dropped; undefined without dropout
};

inline Weights weights(const Attention& a, int64_t i, const at::Tensor& q, const at::Tensor& k) {
  at::Tensor scores = at::matmul(q, k.transpose(1, 2)).mul_(a.scale);
  int64_t rows = scores.size(1), columns = scores.size(2), shift = a.from_end ? columns - rows : 0;
  if (a.bias.defined() && a.bias.numel()) {
    at::Tensor bias = a.bias;
    while (bias.dim() < 4) bias = bias.unsqueeze(0);
    scores.add_(bias.select(0, bias.size(0) == 1 ? 0 : i));
  }
  if (a.left >= 0 || a.right >= 0) {
    at::Tensor distance = at::arange(columns).unsqueeze(0) - at::arange(rows).unsqueeze(1) - shift;
    at::Tensor hidden = at::zeros({rows, columns}, at::kBool);
    if (a.right >= 0) hidden.logical_or_(distance > a.right);
    if (a.left >= 0) hidden.logical_or_(distance < -a.left);
    scores.masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  }
  Weights w;
  w.logsumexp = at::logsumexp(scores, {-1});
  at::Tensor empty = w.logsumexp.isinf().unsqueeze(-1);  // a row whose keys are all masked gives zeros
  w.probabilities = (scores - w.logsumexp.unsqueeze(-1)).exp_().masked_fill_(empty, 0);
  w.dropped = w.probabilities;
  if (a.dropout > 0) {
    at::Tensor drawn = at::empty_like(scores).uniform_(0, 1, a.philox.generator(i + 1));
    w.kept = (drawn >= a.dropout).to(scores.scalar_type()).mul_(1 / (1 - a.dropout));
    w.dropped = w.probabilities * w.kept;
  }
  return w;
}

inline Results attention_forward(const Attention& a, at::IntArrayRef logsumexp_sizes) {
  auto sizes = a.query.sizes().vec();
  sizes.back() = a.value.size(-1);
  at::Tensor output = at::zeros(sizes, a.query.options()), logsumexp = at::zeros(logsumexp_sizes, a.query.options());
  for (int64_t i = 0; i < a.count(); i++) {
    at::Tensor q = a.sequence(a.query, i, false);
    Weights w = weights(a, i, q, a.repeated(a.sequence(a.key, i, true)));
    a.sequence(output, i, false).copy_(at::matmul(w.dropped, a.repeated(a.sequence(a.value, i, true))));
    if (!logsumexp.numel()) continue;
    if (logsumexp.dim() == 2) a.sequence(logsumexp.t().unsqueeze(-1), i, false).squeeze(-1).copy_(w.logsumexp);
    else logsumexp.select(0, i).narrow(-1, 0, q.size(1)).copy_(w.logsumexp);
  }
  return {output, logsumexp};
}

inline at::Tensor summed_groups(const at::Tensor& t, int64_t heads) {
  return t.size(0) == heads ? t : t.view({heads, t.size(0) / heads, t.size(1), t.size(2)}).sum(1);
}

inline Results attention_backward(const Attention& a, const at::Tensor& grad, const at::Tensor& output, bool of_bias) {
  at::Tensor dq = at::zeros_like(a.query), dk = at::zeros_like(a.key), dv = at::zeros_like(a.value), dbias;
  if (of_bias) dbias = at::zeros_like(a.bias, at::MemoryFormat::Contiguous);
  for (int64_t i = 0; i < a.count(); i++) {
    at::Tensor q = a.sequence(a.query, i, false), k = a.sequence(a.key, i, true), v = a.sequence(a.value, i, true);
    at::Tensor g = a.sequence(grad, i, false), wide_k = a.repeated(k);
    Weights w = weights(a, i, q, wide_k);
    at::Tensor dw = at::matmul(g, a.repeated(v).transpose(1, 2));
    if (w.kept.defined()) dw.mul_(w.kept);
    at::Tensor correction = (g * a.sequence(output, i, false)).sum(-1, true);
    at::Tensor ds = dw.sub_(correction).mul_(w.probabilities);
    a.sequence(dq, i, false).copy_(at::matmul(ds, wide_k).mul_(a.scale));
    a.sequence(dk, i, true).copy_(summed_groups(at::matmul(ds.transpose(1, 2), q).mul_(a.scale), k.size(0)));
    a.sequence(dv, i, true).copy_(summed_groups(at::matmul(w.dropped.transpose(1, 2), g), v.size(0)));
    if (of_bias) {
      at::Tensor part = dbias;
      while (part.dim() < 4) part = part.unsqueeze(0);
      part = part.select(0, part.size(0) == 1 ? 0 : i);
      part.add_(ds.sum_to_size(part.sizes()));
    }
  }
  return {dq, dk, dv, dbias};
}

inline uint64_t stored(const at::Tensor& t, int64_t index) { return static_cast<const uint64_t*>(t.const_data_ptr())[index]; }

// The state that forward stored: two numbers in one tensor (flash), or one number in each of two tensors.
inline Philox stored_philox(const Call& call) {
  for (const char* name : {"rng_state", "philox_seed"}) {
    at::Tensor t = call.tensor(name);
    if (!t.defined() || !t.numel()) continue;
    if (t.numel() >= 2) return {stored(t, 0), stored(t, 1)};
    at::Tensor offset = call.tensor("philox_offset");
    return {stored(t, 0), offset.defined() && offset.numel() ? stored(offset, 0) : 0};
  }
  return {};
}

inline at::Tensor first_of(const Call& call, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (at::Tensor t = call.tensor(name); t.defined()) return t;
  return {};
}

inline Attention attention_of(const Call& call) {
  Attention a;
  const std::string& name = call.schema.name();
  a.heads_first = name.find("_scaled_dot_product_") != std::string::npos;
  a.query = call.tensor("query"), a.key = call.tensor("key"), a.value = call.tensor("value");
  a.bias = first_of(call, {"attn_bias", "bias"});
  if (!a.heads_first) {  // these are empty for flash attention without packed sequences
    a.query_starts = first_of(call, {"cum_seq_q", "cu_seqlens_q"});
    a.key_starts = first_of(call, {"cum_seq_k", "cu_seqlens_k"});
  }
  a.scale = call.number("scale", 1 / std::sqrt(static_cast<double>(a.query.size(-1))));
  a.dropout = call.number("dropout_p", 0);
  bool flash = name.find("aten::_flash") == 0;
  a.left = call.integer("window_size_left", -1), a.right = call.integer("window_size_right", -1);
  a.from_end = flash;
  if (call.flag("is_causal")) a.right = 0;
  if (int64_t type = call.integer("custom_mask_type", 0)) {  // 1: causal from the top left, 2: from the bottom right
    a.right = 0;
    a.from_end = type == 2;
    if (int64_t window = call.integer("window_size", 0); window > 0) a.left = window - 1;
  }
  for (const char* unsupported : {"seqused_k", "alibi_slopes", "block_table", "seqlen_k"})
    TORCH_CHECK(!call.tensor(unsupported).defined(), unsupported, " is not supported");
  a.philox = call.philox;
  return a;
}

inline Results attention(const Call& call) {
  Attention a = attention_of(call);
  Results results = attention_forward(a, call.results[1].toTensor().sizes());
  results.resize(call.results.size());
  for (size_t i = 2; i < call.results.size(); i++) {  // store the state, so that backward draws the same numbers
    const std::string& name = call.schema.returns()[i].name();
    if (!call.results[i].isTensor() || !call.results[i].toTensor().defined()) continue;
    const at::Tensor& t = call.results[i].toTensor();
    if (t.element_size() != 8) continue;
    uint64_t* state = static_cast<uint64_t*>(t.data_ptr());
    if (name == "rng_state" || name == "philox_seed") {
      if (t.numel() > 0) state[0] = call.philox.seed;
      if (t.numel() > 1) state[1] = call.philox.offset;
    } else if (name == "philox_offset" && t.numel()) state[0] = call.philox.offset;
  }
  return results;
}

inline Results attention_gradients(const Call& call) {
  Attention a = attention_of(call);
  a.philox = stored_philox(call);
  bool of_bias = call.results.size() > 3 && call.results[3].toTensor().defined() && call.results[3].toTensor().numel() > 0;
  Results gradients = attention_backward(a, first_of(call, {"grad_out", "grad_out_"}), call.tensor("out"), of_bias);
  gradients.resize(call.results.size());
  return gradients;
}

// ---- dropout
inline at::Tensor kept(const Call& call, const at::Tensor& input, double probability) {
  return at::empty(input.sizes(), input.options().dtype(at::kFloat)).uniform_(0, 1, call.philox.generator()) < probability;
}

inline Results native_dropout(const Call& call) {
  at::Tensor input = call.tensor("input");
  double p = call.number("p", 0);
  if ((call["train"].isBool() && !call.flag("train")) || p == 0) return {input, at::ones(input.sizes(), at::kBool)};
  at::Tensor mask = kept(call, input, 1 - p);
  return {p == 1 ? at::zeros_like(input) : (input * mask).mul_(1 / (1 - p)), mask};
}

inline Results fused_dropout(const Call& call) {  // p is the probability to keep an element
  at::Tensor input = call.tensor("self"), mask = kept(call, input, call.number("p", 1));
  return {(input * mask).mul_(1 / call.number("p", 1)), mask};
}

inline Results masked_scale(const Call& call) {
  return {(call.tensor("self") * call.tensor("mask")).mul_(call.number("scale", 1))};
}

// ---- normalisation
inline double epsilon(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return 0x1p-10;
    case at::kBFloat16: return 0x1p-7;
    case at::kDouble: return std::numeric_limits<double>::epsilon();
    default: return std::numeric_limits<float>::epsilon();
  }
}

inline std::vector<int64_t> last_dimensions(const Call& call) {
  std::vector<int64_t> dimensions;
  for (int64_t i = -static_cast<int64_t>(call["normalized_shape"].toIntVector().size()); i < 0; i++) dimensions.push_back(i);
  return dimensions;
}

inline Results rms_norm(const Call& call) {
  at::Tensor input = call.tensor("input"), weight = call.tensor("weight");
  at::Tensor rstd = (input * input).mean(last_dimensions(call), true).add_(call.number("eps", epsilon(call.results[0].toTensor().scalar_type()))).rsqrt_();
  at::Tensor output = input * rstd;
  return {weight.defined() ? output.mul_(weight) : output, rstd};
}

inline Results rms_norm_backward(const Call& call) {
  at::Tensor input = call.tensor("input"), grad = call.tensor("grad_out"), weight = call.tensor("weight");
  at::Tensor rstd = call.tensor("rstd").to(input.scalar_type());
  at::Tensor normalised = input * rstd, scaled = weight.defined() ? grad * weight : grad;
  at::Tensor of_input = (scaled - normalised * (scaled * normalised).mean(last_dimensions(call), true)).mul_(rstd);
  at::Tensor of_weight;
  if (weight.defined()) of_weight = (grad * normalised).reshape({-1, weight.numel()}).sum(0).view(weight.sizes());
  return {of_input, of_weight};
}

inline Results batch_norm(const Call& call) {
  auto [output, mean, rstd] = at::native_batch_norm(call.tensor("input"), call.tensor("weight"), call.tensor("bias"), call.tensor("running_mean"),
                                                    call.tensor("running_var"), call.flag("training"), call.number("exponential_average_factor", 0),
                                                    call.number("epsilon", 0));
  return {output, mean, rstd, at::Tensor()};
}

inline Results batch_norm_backward(const Call& call) {
  auto [input, weight, bias] = at::native_batch_norm_backward(
      call.tensor("grad_output"), call.tensor("input"), call.tensor("weight"), call.tensor("running_mean"), call.tensor("running_var"),
      call.tensor("save_mean"), call.tensor("save_var"), true, call.number("epsilon", 0), {true, true, true});
  return {input, weight, bias};
}

// ---- log sigmoid: the CPU keeps a buffer for the backward pass, the card does not
inline Results log_sigmoid(const Call& call) {
  at::Tensor input = call.tensor("self");
  return {at::minimum(input, at::zeros({}, input.options())) - (-input.abs()).exp_().log1p_(), at::Tensor()};
}
inline Results log_sigmoid_backward(const Call& call) { return {call.tensor("grad_output") * (-call.tensor("self")).sigmoid_()}; }

// ---- matrix products with a float result: the arguments are float already
inline at::Scalar factor(const Call& call, const char* name) { return call[name].isScalar() ? call[name].toScalar() : at::Scalar(1); }

inline Results matrix_product(const Call& call) { return {at::matmul(call.tensor("self"), call.tensor("mat2"))}; }
inline Results matrix_product_and_sum(const Call& call) {
  at::Tensor left = first_of(call, {"mat1", "batch1"}), right = first_of(call, {"mat2", "batch2"});
  return {at::matmul(left, right).mul_(factor(call, "alpha")).add_(call.tensor("self"), factor(call, "beta"))};
}

inline const std::unordered_map<std::string, Decomposition>& decompositions() {
  static const std::unordered_map<std::string, Decomposition> table = {
      {"_scaled_dot_product_flash_attention", attention},
      {"_scaled_dot_product_efficient_attention", attention},
      {"_scaled_dot_product_cudnn_attention", attention},
      {"_flash_attention_forward", attention},
      {"_efficient_attention_forward", attention},
      {"_scaled_dot_product_flash_attention_backward", attention_gradients},
      {"_scaled_dot_product_efficient_attention_backward", attention_gradients},
      {"_scaled_dot_product_cudnn_attention_backward", attention_gradients},
      {"_flash_attention_backward", attention_gradients},
      {"_efficient_attention_backward", attention_gradients},
      {"native_dropout", native_dropout},
      {"_fused_dropout", fused_dropout},
      {"_masked_scale", masked_scale},
      {"_fused_rms_norm", rms_norm},
      {"_fused_rms_norm_backward", rms_norm_backward},
      {"cudnn_batch_norm", batch_norm},
      {"cudnn_batch_norm_backward", batch_norm_backward},
      {"log_sigmoid_forward", log_sigmoid},
      {"log_sigmoid_backward", log_sigmoid_backward},
      {"mm.dtype", matrix_product},
      {"mm.dtype_out", matrix_product},
      {"bmm.dtype", matrix_product},
      {"bmm.dtype_out", matrix_product},
      {"addmm.dtype", matrix_product_and_sum},
      {"addmm.dtype_out", matrix_product_and_sum},
      {"baddbmm.dtype", matrix_product_and_sum},
      {"baddbmm.dtype_out", matrix_product_and_sum},
  };
  return table;
}

}  // namespace host
