// Results computed on the host. Kernels of the emulated card do nothing, so every result reads as zeros. The card's memory is memory of this process:
// after the real operator has run and allocated its results, the CPU's version of the operator writes its results into the same memory.
//
// By default this is done for operators that control the program: small integer and boolean tensors, and a few floats (a loss, a scale).
// With BRIM_CARD_COMPUTE=1 it is done for all operators and types, so that losses and gradients are real. Half precision is computed in
// float and rounded once, as on a real card.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/autocast_mode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "host_operators.h"

namespace c10 {
class AcceleratorError;  // of newer versions of torch
}

namespace {

constexpr int64_t STEERING_INTEGERS = 1 << 22;  // by default: most elements of an integer tensor
constexpr int64_t STEERING_BOOLEANS = 1 << 26;  // by default: most elements of a boolean tensor, which may be a test of a large float tensor: isfinite(x).all()
constexpr int64_t STEERING_FLOATS = 256;        // by default: most elements of a float tensor
constexpr int64_t STEERING_MASKS = 1 << 20;     // by default: most elements of a float tensor that becomes a mask: filled, converted to integers, or drawn and compared
constexpr size_t COPIED_BYTES = 8 << 20;        // by default: largest copy onto the card that is made (COPY_LIMIT in device.c)
constexpr size_t COMPUTED_BYTES = 512 << 20;    // with BRIM_CARD_COMPUTE: largest tensor

// Operators that are computed by default. Names are without overload and trailing underscore.
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

// The shape of the result, or a Python value, depends on the values of the arguments: the operator runs on the host instead.
const std::set<std::string> DATA_DEPENDENT = {"_unique", "_unique2", "bincount", "equal", "masked_select", "nonzero",
                                              "repeat_interleave", "unique_consecutive", "unique_dim", "unique_dim_consecutive"};

// Computed up to STEERING_MASKS floats if their values are known, because they make masks: torch.rand(n) > p. Names are without overload.
const std::set<std::string> MASK_MAKING = {"bernoulli", "bernoulli_", "eq", "fill_", "ge", "gt", "le", "lt", "masked_fill", "masked_fill_", "ne", "uniform_"};
const std::set<std::string> COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"};

// Operators that write every element of their first argument.
const std::set<std::string> OVERWRITING = {"bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "uniform_", "zero_"};

// Operators with indices, which a kernel of a real card checks with an assertion: the names of their arguments for table and indices.
// Names are without overload and trailing underscore.
struct Indexing {
  const char *table, *indices;
};
const std::map<std::string, Indexing> INDEXING = {
    {"index", {"self", "indices"}}, {"_index_put_impl", {"self", "indices"}}, {"index_fill", {"self", "index"}},
    {"index_select", {"self", "index"}}, {"index_add", {"self", "index"}}, {"index_copy", {"self", "index"}},
    {"gather", {"self", "index"}}, {"scatter", {"self", "index"}}, {"scatter_add", {"self", "index"}},
    {"scatter_reduce", {"self", "index"}}, {"nll_loss_forward", {"self", "target"}}, {"nll_loss2d_forward", {"self", "target"}},
    {"_embedding_bag", {"weight", "indices"}}, {"_embedding_bag_forward_only", {"weight", "indices"}}};

// Composite operators that run their own kernels; all others call operators that are computed.
const std::set<std::string> COMPOSITE = {"convolution", "copy_"};

// Operators without values to compute: allocation, aliases, checks.
const std::set<std::string> NO_VALUES = {
    "_assert_async", "_cudnn_init_dropout_state", "_efficientzerotensor", "_fused_sdp_choice", "_local_scalar_dense", "_pin_memory",
    "_resize_output_", "_use_cudnn_ctc_loss", "_use_miopen_ctc_loss", "empty", "empty_strided", "is_pinned", "is_set_to", "record_stream",
    "resize_", "set_"};

// Not widened from half precision: they move values, or the result depends on the type.
const std::set<std::string> EXACT_TYPE = {"_chunk_cat", "_foreach_copy_", "cat", "copy_", "fill_", "flip", "gather", "index", "index_select",
                                          "nan_to_num", "nan_to_num_", "nextafter", "random_", "roll", "split_with_sizes_copy", "uniform_", "zero_"};

// Operators that may put infinities into finite values on purpose.
const std::set<std::string> NON_FINITE = {"cat", "copy", "fill", "index", "masked_fill", "where"};

struct Operator {
  c10::SafeKernelFunction original;
  std::string name;  // without namespace and overload
  host::Decomposition decomposition;
  std::optional<c10::OperatorHandle> functional;  // for an out= variant without a kernel for the CPU: the variant that returns its result
  bool on_host, random, widened, non_finite;
  const Indexing* indexing;  // null for most
};

bool computing() {
  static const bool wanted = getenv("BRIM_CARD_COMPUTE") && !strcmp(getenv("BRIM_CARD_COMPUTE"), "1");
  return wanted;
}

std::unordered_map<c10::OperatorName, Operator>& operators() {
  static std::unordered_map<c10::OperatorName, Operator> table;
  return table;
}

// ---- operators that were not computed
std::mutex uncomputed_lock;
std::map<std::string, std::string>& uncomputed() {  // name -> reason at the first occurrence
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

// ---- the origin of values: computed as in a real run, or not. It is kept by storage, until the memory is allocated again. The results of
// operators that are not wrapped have no entry: floats count as NOT_COMPUTED, integers as EITHER.
enum class Origin { FROM_HOST, COMPUTED, EITHER, NOT_COMPUTED };  // from best to worst; FROM_HOST: copied to the card and not changed since
std::mutex origins_lock;
std::atomic<bool> tracked{false};  // whether allocations are reported (brim_card_clean)
std::unordered_map<const void*, Origin>& origins() {
  static std::unordered_map<const void*, Origin> table;
  return table;
}

const void* storage_of(const at::Tensor& t) { return t.defined() && t.is_cuda() && is_plain(t) && t.has_storage() ? t.storage().data() : nullptr; }

Origin unmarked(const at::Tensor& t) { return is_integer(t) ? Origin::EITHER : Origin::NOT_COMPUTED; }

Origin origin_of(const at::Tensor& t) {
  if (!t.defined() || !t.numel() || !t.is_cuda()) return Origin::COMPUTED;
  if (!tracked) return Origin::EITHER;
  std::lock_guard<std::mutex> hold(origins_lock);
  auto entry = origins().find(storage_of(t));
  return entry == origins().end() ? unmarked(t) : entry->second;
}

void set_origin(const at::Tensor& t, Origin origin) {
  const void* storage = storage_of(t);
  if (!storage || !tracked) return;
  std::lock_guard<std::mutex> hold(origins_lock);
  if (origin == unmarked(t)) origins().erase(storage);
  else origins()[storage] = origin;
}

bool is_whole(const at::Tensor& t) { return t.has_storage() && t.is_non_overlapping_and_dense() && t.nbytes() == t.storage().nbytes(); }

// The worst origin of the arguments, without those that are overwritten.
Origin origin_of(const Operator& entry, const c10::FunctionSchema& schema, const std::vector<c10::IValue>& arguments) {
  Origin worst = Origin::COMPUTED;
  for (size_t i = 0; i < arguments.size(); i++) {
    bool overwritten = schema.arguments()[i].is_out() || (i == 0 && OVERWRITING.count(entry.name) && arguments[0].isTensor() && is_whole(arguments[0].toTensor()));
    if (!overwritten) each_tensor(arguments[i], [&](const at::Tensor& t) { worst = std::max(worst, origin_of(t)); });
  }
  return worst;
}

// Tests for NaN and infinity have the same result for zeros as for all finite numbers. isfinite(x) runs as x == x and |x| != infinity.
bool tests_finiteness(const Operator& entry, const std::vector<c10::IValue>& arguments) {
  if (entry.name == "isnan" || entry.name == "isinf" || entry.name == "isfinite") return true;
  if (!COMPARISONS.count(entry.name) || !arguments[0].isTensor()) return false;
  if (arguments[1].isScalar()) return !std::isfinite(arguments[1].toScalar().toDouble());
  if (!arguments[1].isTensor()) return false;
  const at::Tensor &a = arguments[0].toTensor(), &b = arguments[1].toTensor();
  if (!b.is_cuda()) return b.numel() == 1 && at::isFloatingType(b.scalar_type()) && !std::isfinite(b.item<double>());
  return a.is_same(b) || (a.data_ptr() == b.data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides());
}

// The origin after an operator that was not computed on the host. The card itself copies and zeroes whole tensors.
Origin origin_without_host(const Operator& entry, const std::vector<c10::IValue>& arguments, Origin origin) {
  if (entry.name == "topk" || tests_finiteness(entry, arguments)) return Origin::EITHER;  // topk: spread_choices
  if (entry.name != "zero_" && entry.name != "copy_") return Origin::NOT_COMPUTED;
  const at::Tensor& target = arguments[0].toTensor();
  if (!target.is_contiguous()) return Origin::NOT_COMPUTED;
  if (entry.name == "zero_") return origin;
  const at::Tensor& source = arguments[1].toTensor();
  bool is_copied = target.nbytes() <= COPIED_BYTES && target.sizes() == source.sizes() &&
                   (!source.is_cuda() || (source.is_contiguous() && source.scalar_type() == target.scalar_type()));
  return is_copied ? origin : Origin::NOT_COMPUTED;
}

// The origin of an operator's results. A copy of a whole tensor has the origin of its source.
Origin origin_of_results(const Operator& entry, const std::vector<c10::IValue>& arguments, Origin origin) {
  if (entry.name != "copy_" || !is_whole(arguments[0].toTensor())) return std::max(origin, Origin::COMPUTED);
  bool from_host = !arguments[1].toTensor().is_cuda() && origin == Origin::COMPUTED;
  return from_host ? Origin::FROM_HOST : origin;
}

void mark(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& arguments, const std::vector<c10::IValue>& results, Origin origin) {
  auto set = [&](const at::Tensor& t) { set_origin(t, origin); };
  each_tensor(results, set);
  for (size_t i = 0; i < arguments.size(); i++)
    if (const auto* alias = schema.arguments()[i].alias_info(); alias && alias->isWrite()) each_tensor(arguments[i], set);
}

int64_t most_floats(const Operator& entry, const std::vector<c10::IValue>& arguments, Origin origin) {
  bool to_integer = entry.name == "copy_" && arguments[0].isTensor() && arguments[0].toTensor().defined() && is_integer(arguments[0].toTensor());
  bool is_mask = to_integer || entry.name == "fill_" || (origin <= Origin::COMPUTED && MASK_MAKING.count(entry.name));
  return is_mask ? STEERING_MASKS : STEERING_FLOATS;
}

// ---- shapes that depend on values that were not computed
std::mutex shapes_lock;
std::set<std::string>& uncomputed_shapes() {  // names of operators
  static std::set<std::string> names;
  return names;
}

void shape_not_computed(const std::string& name) {
  if (computing() || name == "equal") return;
  std::lock_guard<std::mutex> hold(shapes_lock);
  uncomputed_shapes().insert(name == "_unique" || name == "_unique2" ? "unique" : name);
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

// Operators on the host run without autograd, autocast and Python modes of the program.
struct PlainDispatch {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// ---- indices out of range: on a real card, a kernel fails with an assertion. Only indices that the program copied to the card (token ids, labels)
// are checked, and only whether they are too large: values that were computed here, even if they then passed through the host, may
// differ from those of a real run.
template <typename Error>
[[noreturn]] void device_assert(const std::string& text) {
  constexpr int32_t cudaErrorAssert = 710;
  std::string message = "CUDA error: device-side assert triggered (" + text + ")";
  c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if constexpr (requires { Error(here, cudaErrorAssert, message); }) throw Error(here, cudaErrorAssert, message);
  else throw c10::Error(here, message);
}

void check_range(const std::string& name, const at::Tensor& index, int64_t size, std::optional<int64_t> ignored = {}) {
  if (!index.defined() || !index.numel() || !size || index.numel() > STEERING_INTEGERS || !is_plain(index)) return;
  if (index.scalar_type() != at::kLong && index.scalar_type() != at::kInt) return;  // a mask
  if (origin_of(index) != Origin::FROM_HOST) return;
  PlainDispatch plain;
  at::Tensor values = same_memory(index);
  if (ignored) values = values.masked_select(values.ne(*ignored));
  if (!values.numel()) return;
  int64_t highest = values.max().item<int64_t>();
  if (highest < size) return;
  device_assert<c10::AcceleratorError>(name + ": index " + std::to_string(highest) + " is out of range for size " + std::to_string(size));
}

void check_indices(const c10::OperatorHandle& op, const Operator& entry, const std::vector<c10::IValue>& arguments) {
  const auto& schema = op.schema();
  auto named = [&](const char* name) { return arguments[*schema.argumentIndexWithName(name)]; };
  if (!schema.argumentIndexWithName(entry.indexing->table) || !schema.argumentIndexWithName(entry.indexing->indices)) return;
  const at::Tensor table = named(entry.indexing->table).toTensor();
  const c10::IValue indices = named(entry.indexing->indices);
  if (!indices.isTensor()) {  // a list of one index per dimension, some undefined; a mask covers as many dimensions as it has
    int64_t dimension = 0;
    for (const c10::IValue& value : indices.toListRef()) {
      const at::Tensor index = value.isTensor() ? value.toTensor() : at::Tensor();
      bool is_mask = index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
      if (dimension < table.dim()) check_range(entry.name == "index" ? "index" : "index_put", index, table.size(dimension));
      dimension += is_mask ? index.dim() : 1;
    }
  } else if (schema.argumentIndexWithName("ignore_index")) {
    check_range("cross entropy or nll_loss", indices.toTensor(), table.size(table.dim() == 1 ? 0 : 1), named("ignore_index").toInt());
  } else if (schema.argumentIndexWithName("dim")) {
    int64_t dimension = table.dim() ? at::maybe_wrap_dim(named("dim").toInt(), table.dim()) : 0;
    bool is_embedding = entry.name == "index_select" && table.dim() == 2 && !dimension && at::isFloatingType(table.scalar_type());
    check_range(is_embedding ? "embedding or index_select" : entry.name, indices.toTensor(), table.dim() ? table.size(dimension) : 1);
  } else {
    check_range("embedding_bag", indices.toTensor(), table.size(0));
  }
}

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
  if (!to.defined() || !from.defined() || !to.is_cuda() || !to.numel() || !from.numel()) return;  // statistics that only one of the two computes
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

// ---- by default, values that were not computed are zeros: the NaN of 0/0 must not look like a diverged loss
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

// The result of a comparison of floats that are not computed: that of zeros. isfinite(x) runs as x == x and |x| != infinity.
void compare_zeros(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, const std::vector<c10::IValue>& results) {
  if (!COMPARISONS.count(operators().at(op.operator_name()).name) || results.size() != 1 || !results[0].isTensor()) return;
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
// Greater than 0 inside the card's own operator. Its results are computed afterwards, so operators that it calls are computed only if their results
// are integers or booleans, which it may read.
thread_local int nested = 0;
struct Nested {
  Nested() { nested++; }
  ~Nested() { nested--; }
};

void repeat_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Operator& entry = operators().at(op.operator_name());
  const auto& schema = op.schema();
  if (nested && (schema.is_mutable() || entry.random)) return entry.original.callBoxed(op, keys, stack);
  auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  if (entry.indexing && !nested) check_indices(op, entry, arguments);
  Origin origin = origin_of(entry, schema, arguments);
  int64_t floats = most_floats(entry, arguments, origin);
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
    mark(schema, arguments, results, origin_of_results(entry, arguments, origin_without_host(entry, arguments, origin)));
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
    bool is_plausible = origin == Origin::NOT_COMPUTED && (entry.name == "topk" || tests_finiteness(entry, arguments));
    mark(schema, arguments, results, origin_of_results(entry, arguments, is_plausible ? Origin::EITHER : origin));
  } catch (const std::exception& error) {
    not_computed(op, error.what());
    mark(schema, arguments, results, Origin::NOT_COMPUTED);
  }
}

void answer_from_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Operator& entry = operators().at(op.operator_name());
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  c10::Device device = c10::kCPU;
  each_tensor(arguments, [&](const at::Tensor& t) { if (t.defined() && t.is_cuda()) device = t.device(); });
  Origin origin = origin_of(entry, op.schema(), arguments);
  const c10::IValue& selector = arguments[entry.name == "masked_select" ? 1 : 0];  // determines the shape of the result
  Origin shape = selector.isTensor() ? origin_of(selector.toTensor()) : origin;
  bool accepted = are_accepted(arguments, origin <= Origin::COMPUTED ? STEERING_MASKS : STEERING_FLOATS);
  bool known = selector.isTensor() ? is_accepted(selector.toTensor(), origin <= Origin::COMPUTED ? STEERING_MASKS : STEERING_FLOATS) : accepted;
  if (!known || shape == Origin::NOT_COMPUTED) shape_not_computed(entry.name);
  if (!accepted) return entry.original.callBoxed(op, keys, stack);
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
  each_tensor(torch::jit::last(*stack, op.schema().returns().size()).vec(), [&](const at::Tensor& t) { set_origin(t, std::max(origin, Origin::COMPUTED)); });
}

// Operators that are not computed, but whose indices are checked.
void check_and_run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Operator& entry = operators().at(op.operator_name());
  if (!nested) check_indices(op, entry, torch::jit::last(*stack, op.schema().arguments().size()).vec());
  entry.original.callBoxed(op, keys, stack);
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
  bool data_dependent = DATA_DEPENDENT.count(base), computed = computing() || data_dependent || STEERING.count(stem(base));
  auto indexing = INDEXING.find(stem(base));
  if (!computed && indexing == INDEXING.end()) return;
  auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CUDA)) return;
  if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !COMPOSITE.count(base)) return;
  const auto& schema = op->schema();
  if (is_alias(schema) || (data_dependent && schema.is_mutable())) return;
  auto entry = host::decompositions().find(full);
  host::Decomposition decomposition = entry == host::decompositions().end() ? nullptr : entry->second;
  bool on_host = decomposition || op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  std::optional<c10::OperatorHandle> functional;
  if (!on_host && name.overload_name == "out") functional = c10::Dispatcher::singleton().findSchema({name.name, ""});
  if (functional && !functional->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) functional.reset();
  operators().emplace(name, Operator{
      op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA), base, decomposition, functional, on_host || functional,
      decomposition || takes_generator(schema),
      !data_dependent && !EXACT_TYPE.count(base), NON_FINITE.count(stem(base)) > 0, indexing == INDEXING.end() ? nullptr : &indexing->second});
  if (!computed) library(space).impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&check_and_run>());
  else if (data_dependent) library(space).impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&answer_from_host>());
  else library(space).impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&repeat_on_host>());
}

// New blocks read as zeros, as if they came from cudaMalloc: a result never contains the data of a freed tensor.
template <typename Entry>  // the type, because torch has moved it between namespaces
void clean(const Entry& entry) {
  if (entry.action_ != Entry::ALLOC) return;
  {
    std::lock_guard<std::mutex> hold(origins_lock);
    origins().erase(reinterpret_cast<const void*>(entry.addr_));
  }
  char* start = reinterpret_cast<char*>(entry.addr_);
  size_t page = 4096, head = (page - entry.addr_ % page) % page;
  size_t rewritten = computing() ? 32 << 20 : 4 * page;  // computed results write their pages anyway
  if (entry.size_ < rewritten) { memset(start, 0, entry.size_); return; }
  size_t body = (entry.size_ - head) / page * page;
  memset(start, 0, head);
  madvise(start + head, body, MADV_DONTNEED);
  memset(start + head + body, 0, entry.size_ - head - body);
}

}  // namespace

// Wraps the operators of a namespace, such as that of a package after its import. Returns the number of all wrapped operators.
extern "C" size_t brim_card_values_of(const char* space) {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);  // torch warns when kernels are replaced
  std::string prefix = std::string(space) + "::";
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind(prefix, 0) == 0) install(name);
  return operators().size();
}

// Called at `import torch`.
extern "C" size_t brim_card_values() { return brim_card_values_of("aten"); }

// Called when CUDA is initialised. The cudaMallocAsync backend has no trackers and needs none: its blocks come from the card and read as zeros.
extern "C" void brim_card_clean() {
  try {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const auto& entry) { clean(entry); });
    tracked = true;
  } catch (const c10::Error&) {
  }
}

// Copies a text to a buffer and returns the length of the whole text.
static size_t answer(const std::string& text, char* buffer, size_t room) {
  if (room) snprintf(buffer, room, "%s", text.c_str());
  return text.size();
}

// Operators whose float results were not computed, one per line: name, tab, reason.
extern "C" size_t brim_card_uncomputed(char* buffer, size_t room) {
  std::lock_guard<std::mutex> hold(uncomputed_lock);
  std::string text;
  for (const auto& [name, reason] : uncomputed()) text += name + "\t" + reason.substr(0, reason.find('\n')) + "\n";
  return answer(text, buffer, room);
}

// Operators whose results have a shape that depends on values that were not computed, one per line.
extern "C" size_t brim_card_uncomputed_shapes(char* buffer, size_t room) {
  std::lock_guard<std::mutex> hold(shapes_lock);
  std::string text;
  for (const auto& name : uncomputed_shapes()) text += name + "\n";
  return answer(text, buffer, room);
}
