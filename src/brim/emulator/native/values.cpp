// Results computed on the host. Kernels of the emulated card do nothing, so every result reads as zeros. The card's memory is memory of this process:
// after the real operator has run, and allocated what it allocates, the same operator of the CPU writes its results into the same memory.
//
// By default this is done for operators that steer the program: small integer and boolean tensors, and a few floats (a loss, a scale).
// With BRIM_CARD_COMPUTE=1 it is done for every operator and type, so that losses and gradients are real. Half precision is computed in
// float and rounded once, as the card does it.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/autocast_mode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "host_operators.h"

namespace {

constexpr int64_t STEERING_INTEGERS = 1 << 22;  // by default: most elements of an integer tensor
constexpr int64_t STEERING_BOOLEANS = 1 << 26;  // by default: most elements of a boolean tensor, which may say something of a float one: isfinite(x).all()
constexpr int64_t STEERING_FLOATS = 256;        // by default: most elements of a float tensor
constexpr int64_t STEERING_MASKS = 1 << 20;     // by default: most elements of a float tensor that is filled, or becomes an integer one: a mask of ones
constexpr size_t COMPUTED_BYTES = 512 << 20;    // with BRIM_CARD_COMPUTE: largest tensor

// Computed by default. Names are without overload and trailing underscore.
const std::set<std::string> STEERING = {
    "__lshift__", "__rshift__", "_amp_update_scale", "_cummax_helper", "_cummin_helper", "_foreach_add", "_foreach_div", "_foreach_mul", "_foreach_sub",
    "_index_put_impl", "abs", "add", "all", "amax", "amin", "aminmax", "any", "arange", "argmax", "argmin", "bernoulli", "bitwise_and",
    "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "bucketize", "cat", "ceil", "clamp", "clamp_max",
    "clamp_min", "copy", "count_nonzero", "cumprod", "cumsum", "div", "eq", "exponential", "eye", "fill", "flip", "floor", "floor_divide", "fmod",
    "gather", "ge", "gt", "histc", "index", "index_add", "index_copy", "index_fill", "index_select", "isfinite", "isin", "isnan", "kthvalue", "le",
    "linspace", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "masked_scatter", "max", "maximum", "mean", "median",
    "min", "minimum", "mode", "mul", "multinomial", "nan_to_num", "ne", "neg", "normal", "pow", "prod", "put", "random", "randperm", "range",
    "reciprocal", "remainder", "roll", "round", "rsub", "scatter", "scatter_add", "scatter_reduce", "searchsorted", "sgn", "sign", "sort", "sqrt",
    "sub", "sum", "take", "topk", "tril", "tril_indices", "triu", "triu_indices", "trunc", "uniform", "where", "zero"};

// The shape of the result, or a Python value, depends on values: the host's result is the only one.
const std::set<std::string> DATA_DEPENDENT = {"_unique", "_unique2", "bincount", "equal", "masked_select", "nonzero",
                                              "repeat_interleave", "unique_consecutive", "unique_dim", "unique_dim_consecutive"};

// Composite operators that run kernels of their own; all others call operators that are computed.
const std::set<std::string> COMPOSITE = {"convolution", "copy_"};

// Nothing to compute: allocation, aliases, checks.
const std::set<std::string> NO_VALUES = {
    "_assert_async", "_cudnn_init_dropout_state", "_efficientzerotensor", "_fused_sdp_choice", "_local_scalar_dense", "_pin_memory",
    "_resize_output_", "_use_cudnn_ctc_loss", "_use_miopen_ctc_loss", "empty", "empty_strided", "is_pinned", "is_set_to", "record_stream",
    "resize_", "set_"};

// Half precision stays: they move values, or the result depends on the type.
const std::set<std::string> EXACT_TYPE = {"_chunk_cat", "_foreach_copy_", "cat", "copy_", "fill_", "flip", "gather", "index", "index_select",
                                          "nan_to_num", "nan_to_num_", "nextafter", "random_", "roll", "split_with_sizes_copy", "uniform_", "zero_"};

// May put infinities into finite values on purpose.
const std::set<std::string> NON_FINITE = {"cat", "copy", "fill", "index", "masked_fill", "where"};

struct Operator {
  c10::SafeKernelFunction original;
  std::string name;  // without namespace and overload
  host::Decomposition decomposition;
  std::optional<c10::OperatorHandle> functional;  // for an out= variant without kernel for the CPU: the one that returns its result
  bool on_host, random, data_dependent, widened, non_finite;
};

bool computing() {
  static const bool wanted = getenv("BRIM_CARD_COMPUTE") && !strcmp(getenv("BRIM_CARD_COMPUTE"), "1");
  return wanted;
}

std::unordered_map<c10::OperatorName, Operator>& operators() {
  static std::unordered_map<c10::OperatorName, Operator> table;
  return table;
}

// ---- what was not computed
std::mutex uncomputed_lock;
std::map<std::string, std::string>& uncomputed() {  // name -> reason, of the first time
  static std::map<std::string, std::string> names;
  return names;
}

void not_computed(const c10::OperatorHandle& op, const char* reason) {
  static const bool tracing = getenv("BRIM_CARD_TRACE") != nullptr;
  if (tracing) fprintf(stderr, "brim: not computed: %s: %.300s\n", c10::toString(op.operator_name()).c_str(), reason);
  if (!computing()) return;
  std::lock_guard<std::mutex> hold(uncomputed_lock);
  uncomputed().emplace(c10::toString(op.operator_name()), reason);
}

// ---- tensors and arguments on the host
template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) visit(t);
  } else if (value.isList()) {
    for (const c10::IValue& inner : value.toListRef())
      if (inner.isTensor()) visit(inner.toTensor());
  }
}

template <typename Visit>
void each_tensor(const std::vector<c10::IValue>& values, Visit visit) {
  for (const auto& value : values) each_tensor(value, visit);
}

bool is_float_on_card(const at::Tensor& t) {
  return t.defined() && t.is_cuda() && t.numel() && (at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type()));
}

bool has_floats(const std::vector<c10::IValue>& values) {
  bool answer = false;
  each_tensor(values, [&](const at::Tensor& t) { answer = answer || is_float_on_card(t); });
  return answer;
}

bool is_plain(const at::Tensor& t) { return t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized() && !t.is_meta(); }

bool are_plain(const std::vector<c10::IValue>& values) {
  bool answer = true;
  each_tensor(values, [&](const at::Tensor& t) { answer = answer && (!t.defined() || is_plain(t)); });
  return answer;
}

bool is_integer(const at::Tensor& t) { return at::isIntegralType(t.scalar_type(), /*includeBool=*/true); }

bool is_accepted(const at::Tensor& t, int64_t most_floats = STEERING_FLOATS) {
  if (!t.defined()) return true;
  if (!is_plain(t)) return false;
  if (computing()) return t.nbytes() <= COMPUTED_BYTES;
  return t.numel() <= (t.scalar_type() == at::kBool ? STEERING_BOOLEANS : is_integer(t) ? STEERING_INTEGERS : most_floats) && (is_integer(t) || at::isFloatingType(t.scalar_type()));
}

bool are_accepted(const std::vector<c10::IValue>& values, int64_t most_floats = STEERING_FLOATS) {
  bool answer = true;
  each_tensor(values, [&](const at::Tensor& t) { answer = answer && is_accepted(t, most_floats); });
  return answer;
}

int64_t most_floats(const std::string& name, const std::vector<c10::IValue>& arguments) {
  bool is_mask = name == "fill_" || (name == "copy_" && arguments[0].isTensor() && arguments[0].toTensor().defined() && is_integer(arguments[0].toTensor()));
  return is_mask ? STEERING_MASKS : STEERING_FLOATS;
}

at::Tensor same_memory(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  at::Tensor view = at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  return view;
}

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

class HostArguments {
 public:
  HostArguments(const Operator& entry, const c10::FunctionSchema& schema, const std::vector<c10::IValue>& arguments, const host::Philox& philox)
      : widened_(entry.widened) {
    for (size_t i = 0; i < arguments.size(); i++) {
      const c10::Argument& argument = schema.arguments()[i];
      written_ = argument.alias_info() && argument.alias_info()->isWrite();
      if (entry.random && argument.name() == "generator") stack.emplace_back(philox.generator());
      else if (widened_ && argument.name() == "half_to_float") stack.emplace_back(false);
      else if (widened_ && argument.name() == "input_dtype") stack.emplace_back(at::kFloat);
      else if (widened_ && argument.name() == "dtype" && arguments[i].isInt() && is_half(arguments[i].toScalarType())) stack.emplace_back(at::kFloat);
      else stack.push_back(convert(arguments[i]));
    }
  }
  void write_back() const {
    for (const auto& [target, source] : rounded_) target.copy_(source);
  }
  torch::jit::Stack stack;

 private:
  at::Tensor convert(const at::Tensor& t) {
    at::Tensor view = same_memory(t);
    if (!widened_ || !t.defined() || !t.is_cuda() || !is_half(t.scalar_type())) return view;
    at::Tensor wide = view.to(at::kFloat);
    if (written_) rounded_.emplace_back(view, wide);
    return wide;
  }
  c10::IValue convert(const c10::IValue& value) {
    if (value.isTensor()) return convert(value.toTensor());
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (value.isTensorList()) {
      std::vector<at::Tensor> moved;
      for (const at::Tensor& t : value.toTensorVector()) moved.push_back(convert(t));
      return moved;
    }
    if (value.isList()) {
      auto list = value.toList().copy();
      for (size_t i = 0; i < list.size(); i++)
        if (c10::IValue inner = list.get(i); inner.isTensor()) list.set(i, convert(inner.toTensor()));
      return list;
    }
    return value;
  }
  bool widened_, written_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> rounded_;
};

// Operators on the host are plain ones: no autograd, autocast or Python modes of the program.
struct PlainDispatch {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

host::Philox philox_before(const std::vector<c10::IValue>& arguments) {
  at::Generator generator;
  c10::Device device(c10::kCUDA, -1);
  for (const auto& value : arguments)
    if (value.isGenerator()) generator = value.toGenerator();
  each_tensor(arguments, [&](const at::Tensor& t) { if (t.defined() && t.is_cuda()) device = t.device(); });
  if (!generator.defined() || generator.device().type() != c10::kCUDA) {
    if (generator.defined()) return {};
    generator = at::globalContext().defaultGenerator(device);
  }
  std::lock_guard<std::mutex> hold(generator.mutex());
  return {generator.current_seed(), generator.get_offset()};
}

void copy_result(const c10::IValue& target, const c10::IValue& source) {
  if (target.isTensorList()) {
    auto targets = target.toTensorVector(), sources = source.toTensorVector();
    TORCH_CHECK(targets.size() == sources.size(), "other number of results");
    for (size_t i = 0; i < targets.size(); i++) copy_result(targets[i], sources[i]);
    return;
  }
  if (!target.isTensor() || !source.isTensor()) return;
  const at::Tensor &to = target.toTensor(), &from = source.toTensor();
  if (!to.defined() || !from.defined() || !to.is_cuda() || !to.numel() || !from.numel()) return;  // statistics that one of the two does without
  TORCH_CHECK(to.sizes() == from.sizes(), "the host's result has the shape ", from.sizes(), ", the card's ", to.sizes());
  same_memory(to).copy_(from);
}

void run_on_host(const c10::OperatorHandle& op, const Operator& entry, const std::vector<c10::IValue>& arguments, const std::vector<c10::IValue>& results,
                 const host::Philox& philox) {
  const auto& schema = op.schema();
  HostArguments host(entry, schema, arguments, philox);
  if (entry.decomposition) {
    auto computed = entry.decomposition(host::Call{schema, host.stack, results, philox});
    for (size_t i = 0; i < results.size() && i < computed.size(); i++) copy_result(results[i], computed[i]);
    return;
  }
  torch::jit::Stack stack = host.stack;
  if (entry.functional) {
    stack.pop_back();
    entry.functional->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    copy_result(arguments.back(), stack.back());
    return;
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  host.write_back();
  for (size_t i = 0; i < results.size(); i++) {
    const auto* alias = schema.returns()[i].alias_info();
    if (!alias || !alias->isWrite()) copy_result(results[i], stack[i]);
  }
}

// ---- by default, values that were never computed are zeros: 0/0 must not look like a diverged loss
bool are_finite(const std::vector<c10::IValue>& values) {
  bool answer = true;
  for (const auto& value : values)
    if (value.isDouble() || (value.isScalar() && value.toScalar().isFloatingPoint())) answer = answer && std::isfinite(value.toScalar().toDouble());
  each_tensor(values, [&](const at::Tensor& t) {
    if (t.defined() && at::isFloatingType(t.scalar_type())) answer = answer && same_memory(t).to(at::kDouble).isfinite().all().item<bool>();
  });
  return answer;
}

void replace_non_finite(const std::vector<c10::IValue>& values) {
  each_tensor(values, [&](const at::Tensor& t) {
    if (is_float_on_card(t)) same_memory(t).nan_to_num_(0, 0, 0);
  });
}

// Routers choose experts with topk. Zeros would send every token to the same experts: spread them evenly instead.
void spread_choices(const std::vector<c10::IValue>& arguments, const std::vector<c10::IValue>& results) {
  if (results.size() != 2 || !results[1].isTensor() || !is_accepted(results[1].toTensor())) return;
  at::Tensor input = arguments[0].toTensor(), indices = same_memory(results[1].toTensor());
  if (!indices.dim() || !indices.numel()) return;
  int64_t dimension = at::maybe_wrap_dim(arguments[2].toInt(), input.dim());
  at::Tensor rows = indices.transpose(dimension, -1);
  rows.copy_(at::arange(indices.numel()).remainder_(input.size(dimension)).view(rows.sizes()));
}

// A comparison of floats that are not computed: they read as zeros, so the answer is that for zeros. isfinite(x) is x == x and |x| != infinity.
void compare_zeros(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, const std::vector<c10::IValue>& results) {
  static const std::set<std::string> comparisons = {"eq", "ne", "lt", "le", "gt", "ge"};
  if (!comparisons.count(operators().at(op.operator_name()).name) || results.size() != 1 || !results[0].isTensor()) return;
  const at::Tensor& result = results[0].toTensor();
  if (result.scalar_type() != at::kBool || !is_accepted(result)) return;
  torch::jit::Stack stack;
  for (const auto& value : arguments) {
    if (!value.isTensor()) { stack.push_back(value); continue; }
    const at::Tensor& t = value.toTensor();
    if (!is_accepted(t) && at::isFloatingType(t.scalar_type())) stack.emplace_back(at::zeros({}, t.options().device(at::kCPU)));
    else if (t.numel() == 1 && is_accepted(t)) stack.emplace_back(same_memory(t));
    else return;
  }
  PlainDispatch plain;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  same_memory(result).fill_(stack.back().toTensor().item<bool>());
}

// ---- the wrappers
thread_local int nested = 0;  // inside the card's own operator: its results will be computed, so what it calls is not, except what it may check
struct Nested {
  Nested() { nested++; }
  ~Nested() { nested--; }
};

void repeat_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Operator& entry = operators().at(op.operator_name());
  const auto& schema = op.schema();
  if (nested && (schema.is_mutable() || entry.random)) return entry.original.callBoxed(op, keys, stack);
  auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  int64_t floats = most_floats(entry.name, arguments);
  bool accepted = entry.on_host && are_accepted(arguments, floats);
  host::Philox philox;
  if (entry.random && accepted) philox = philox_before(arguments);
  if (accepted) {
    Nested inside;
    entry.original.callBoxed(op, keys, stack);
  } else {
    entry.original.callBoxed(op, keys, stack);
  }
  auto results = torch::jit::last(*stack, schema.returns().size()).vec();
  if (nested && has_floats(results)) return;
  if (!accepted || !are_accepted(results, floats)) {  // an out= argument may have grown
    if (computing() && has_floats(schema.is_mutable() ? arguments : results))
      not_computed(op, !entry.on_host ? "no kernel for the CPU" : are_plain(arguments) ? "larger than 512 MiB" : "not a strided tensor");
    if (!computing() && entry.name == "topk") spread_choices(arguments, results);
    if (!computing() && !schema.is_mutable()) {
      try {
        compare_zeros(op, arguments, results);
      } catch (const std::exception& error) {
        not_computed(op, error.what());
      }
    }
    return;
  }
  try {
    PlainDispatch plain;
    bool tidy = !computing() && !entry.non_finite && are_finite(arguments);
    run_on_host(op, entry, arguments, results, philox);
    if (tidy) {
      replace_non_finite(results);
      if (schema.is_mutable()) replace_non_finite(arguments);
    }
  } catch (const std::exception& error) {
    not_computed(op, error.what());
  }
}

void answer_from_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Operator& entry = operators().at(op.operator_name());
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  c10::Device device = c10::kCPU;
  each_tensor(arguments, [&](const at::Tensor& t) { if (t.defined() && t.is_cuda()) device = t.device(); });
  if (!are_accepted(arguments)) return entry.original.callBoxed(op, keys, stack);
  torch::jit::Stack host;
  try {
    PlainDispatch plain;
    HostArguments converted(entry, op.schema(), arguments, {});
    host = converted.stack;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
  } catch (const std::exception& error) {
    not_computed(op, error.what());
    return entry.original.callBoxed(op, keys, stack);
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& value : host) stack->push_back(value.isTensor() ? c10::IValue(value.toTensor().to(device)) : value);
}

// ---- installation
torch::Library& library(const std::string& space) {
  static std::unordered_map<std::string, std::unique_ptr<torch::Library>> made;
  auto& entry = made[space];
  if (!entry) entry = std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::CUDA, __FILE__, __LINE__);
  return *entry;
}

bool is_alias(const c10::FunctionSchema& schema) {
  for (const auto& value : schema.returns())
    if (value.alias_info() && !value.alias_info()->isWrite()) return true;
  return false;
}

bool takes_generator(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.name() == "generator") return true;
  return false;
}

std::string stem(std::string name) {
  while (name.size() > 1 && name.back() == '_' && !STEERING.count(name)) name.pop_back();
  return name;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void install(const c10::OperatorName& name) {
  size_t colons = name.name.find("::");
  std::string space = name.name.substr(0, colons), base = name.name.substr(colons + 2);
  std::string full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
  if (operators().count(name) || NO_VALUES.count(base)) return;
  bool data_dependent = DATA_DEPENDENT.count(base);
  if (!computing() && !data_dependent && !STEERING.count(stem(base))) return;
  auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CUDA)) return;
  if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !COMPOSITE.count(base)) return;
  const auto& schema = op->schema();
  if (is_alias(schema) || (data_dependent && schema.is_mutable())) return;
  auto found = host::decompositions().find(full);
  host::Decomposition decomposition = found == host::decompositions().end() ? nullptr : found->second;
  bool on_host = decomposition || op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  std::optional<c10::OperatorHandle> functional;
  if (!on_host && name.overload_name == "out") functional = c10::Dispatcher::singleton().findSchema({name.name, ""});
  if (functional && !functional->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) functional.reset();
  operators().emplace(name, Operator{
      op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA), base, decomposition, functional, on_host || functional,
      decomposition || takes_generator(schema), data_dependent,
      !data_dependent && !EXACT_TYPE.count(base), NON_FINITE.count(stem(base)) > 0});
  if (data_dependent) library(space).impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&answer_from_host>());
  else library(space).impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&repeat_on_host>());
}

// New blocks read as zeros, as if each came fresh from the card: no result is what another tensor left behind.
template <typename Entry>  // torch has moved it between namespaces
void clean(const Entry& entry) {
  if (entry.action_ != Entry::ALLOC) return;
  char* start = reinterpret_cast<char*>(entry.addr_);
  size_t page = 4096, head = (page - entry.addr_ % page) % page;
  size_t rewritten = computing() ? 32 << 20 : 4 * page;  // computed results touch their pages anyway
  if (entry.size_ < rewritten) { memset(start, 0, entry.size_); return; }
  size_t body = (entry.size_ - head) / page * page;
  memset(start, 0, head);
  madvise(start + head, body, MADV_DONTNEED);
  memset(start + head + body, 0, entry.size_ - head - body);
}

}  // namespace

// Wraps the operators of a namespace: that of a package once it is imported. Returns how many are wrapped in all.
extern "C" size_t brim_card_values_of(const char* space) {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);  // torch warns of kernels that are replaced
  std::string prefix = std::string(space) + "::";
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind(prefix, 0) == 0) install(name);
  return operators().size();
}

// At `import torch`.
extern "C" size_t brim_card_values() { return brim_card_values_of("aten"); }

// Once CUDA is initialised. The cudaMallocAsync backend has no trackers, and needs none: each of its blocks comes fresh from the card.
extern "C" void brim_card_clean() {
  try {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const auto& entry) { clean(entry); });
  } catch (const c10::Error&) {
  }
}

// Operators whose float results were not computed, one on each line: name, tab, reason. Returns the bytes of the whole answer.
extern "C" size_t brim_card_uncomputed(char* buffer, size_t room) {
  std::lock_guard<std::mutex> hold(uncomputed_lock);
  std::string text;
  for (const auto& [name, reason] : uncomputed()) text += name + "\t" + reason.substr(0, reason.find('\n')) + "\n";
  if (room) snprintf(buffer, room, "%s", text.c_str());
  return text.size();
}
