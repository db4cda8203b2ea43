#include "virtual.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>

namespace virtual_accelerator {
using c10::Device, c10::Stream;
constexpr auto kType = c10::kPrivateUse1;
struct Block {  // an allocation, and the last operations on it
  void* memory;
  size_t size;
  int device, stream;
  int writer = -1;
  uint64_t write_number = 0;
  std::string operation = "nothing";
  std::map<int, uint64_t> readers;
  std::set<int> recorded;
  std::shared_ptr<Pending> pending;
};

static std::recursive_mutex lock;  // of everything below; never held while something waits
using Lock = std::lock_guard<std::recursive_mutex>;
template <class T> static T& forever() { return *new T{}; }  // tensors may be freed after the end of static objects
static std::array<Clock, kDevices * kStreams> clocks{};
static Clock host{};
static std::array<int, kDevices> created_streams{};
static auto& pendings = forever<std::vector<std::shared_ptr<Pending>>>();
static auto& counters = forever<std::map<std::string, int64_t>>();
static auto& failure = forever<std::string>();  // found where nothing can be raised, such as in a destructor
static bool forbids_host_waits = false;
static auto& pinned = forever<std::set<const void*>>();
static thread_local int device_index = 0;
static thread_local std::array<int, kDevices> streams{};

static std::string describe(int stream) {
  return "stream " + std::to_string(stream % kStreams) + " of virtual:" + std::to_string(stream / kStreams);
}
static void merge(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); i++) into[i] = std::max(into[i], other[i]);
}
static void set_device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "virtual: invalid device ordinal ", index);
  device_index = index;
}
static int index_of(Device device) { return device.index() < 0 ? device_index : device.index(); }
static int index_of(const Stream& stream) { return stream.device_index() * kStreams + static_cast<int>(stream.id()); }
int current_device() { return device_index; }
int current_stream(int device) { return device * kStreams + streams[device]; }
int exchange_stream(int device, int stream) { return std::exchange(streams[device], stream); }
int new_stream(int device) { Lock l(lock); return 1 + created_streams[device]++ % (kStreams - 1); }
Clock clock_of(int stream) { Lock l(lock); merge(clocks[stream], host); return clocks[stream]; }
void stream_waits(int stream, const Clock& clock) { Lock l(lock); merge(clocks[stream], clock); }
void count(const std::string& name, int64_t amount) { Lock l(lock); counters[name] += amount; }
static void raise_failure() {
  std::string found;
  { Lock l(lock); std::swap(found, failure); }
  TORCH_CHECK(found.empty(), found);
}

// ------------------------------------------------------------------------------------------- operations and waiting
void Pending::settle() {
  std::lock_guard<std::mutex> l(mutex_);
  if (auto work = std::exchange(finish, nullptr)) {
    try { work(); } catch (...) { error_ = std::current_exception(); }
    is_settled = true;
  }
  if (error_) std::rethrow_exception(error_);
}
static std::vector<std::shared_ptr<Pending>> pending_before(const Clock& clock) {
  Lock l(lock);
  std::vector<std::shared_ptr<Pending>> found;
  for (auto& p : pendings) if (clock[p->stream] >= p->number) found.push_back(p);
  return found;
}
static bool is_known(const Clock& clock) {
  Lock l(lock);
  return std::equal(clock.begin(), clock.end(), host.begin(), std::less_equal<>());
}
bool is_finished(const Clock& clock) {
  for (auto& p : pending_before(clock)) if (!p->is_ready()) return false;
  host_waits(clock, nullptr);  // the host knows now
  return true;
}
void host_waits(const Clock& clock, const char* reason) {
  if (reason) {
    TORCH_CHECK(!forbids_host_waits, "virtual: the host waits for a device (", reason, ")");
    count("host waits"); count(std::string("host waits: ") + reason);
  }
  for (auto& p : pending_before(clock)) p->settle();
  { Lock l(lock); merge(host, clock); }
  raise_failure();
}
static Block* block_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return nullptr;
  return static_cast<Block*>(tensor.storage().data_ptr().get_context());
}
void record(const Tensor& tensor, int stream) {
  Lock l(lock);
  if (auto* b = block_of(tensor)) b->recorded.insert(stream);
}
void defer(std::shared_ptr<Pending> pending, const Tensors& outputs) {
  Lock l(lock);
  std::erase_if(pendings, [](auto& p) { return p->is_settled.load(); });
  pendings.push_back(pending);
  for (auto& t : outputs) if (auto* b = block_of(t)) b->pending = pending;
}
Tensor host_view(const Tensor& tensor, bool settles) {
  std::shared_ptr<Pending> pending;
  { Lock l(lock); if (auto* b = block_of(tensor)) pending = b->pending; }
  if (pending && settles) pending->settle();
  void* memory = tensor.numel() ? tensor.data_ptr() : nullptr;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), options);
}
uint64_t launched(const std::string& name, const Tensors& reads, const Tensors& writes, int stream) {
  raise_failure();
  Lock l(lock);
  counters["kernels"]++;
  auto& known = clocks[stream];
  merge(known, host);
  const uint64_t number = ++known[stream];
  auto check = [&](const Block& b, int other, uint64_t then, const char* what) {
    TORCH_CHECK(other < 0 || known[other] >= then, "virtual: race: ", name, " on ", describe(stream), " ", what, " ",
                describe(other), ", without waiting for it (written last by ", b.operation, ")");
  };
  for (auto& t : reads) if (auto* b = block_of(t)) {
    check(*b, b->writer, b->write_number, "reads memory written on");
    b->readers[stream] = number;
  }
  for (auto& t : writes) if (auto* b = block_of(t)) {
    check(*b, b->writer, b->write_number, "overwrites memory written on");
    for (auto& [reader, then] : b->readers) if (reader != stream) check(*b, reader, then, "overwrites memory read on");
    b->readers.clear(); b->writer = stream; b->write_number = number; b->operation = name;
  }
  return number;
}

// ---------------------------------------------------------------------------------------------------------- memory
using Stats = c10::CachingDeviceAllocator::DeviceStats;
static auto& statistics = forever<std::array<Stats, kDevices>>();
template <class F> static void for_bytes(int device, F change) {
  change(statistics[device].allocated_bytes[0]);
  change(statistics[device].reserved_bytes[0]);
}
constexpr size_t kMemory = size_t(1) << 30;  // of each device
struct Allocator final : c10::DeviceAllocator {
  static void release(void* context) {
    std::unique_ptr<Block> b(static_cast<Block*>(context));
    Lock l(lock);
    for_bytes(b->device, [&](auto& bytes) { bytes.decrease(b->size); });
    if (b->writer >= 0) b->readers[b->writer] = std::max(b->readers[b->writer], b->write_number);
    const auto& known = clocks[b->stream];
    for (auto& [stream, number] : b->readers)
      if (stream != b->stream && std::max(known[stream], host[stream]) < number && !b->recorded.count(stream))
        failure = "virtual: freed in use: memory of " + describe(b->stream) + " was freed while " + describe(stream) +
                  " used it, without `record_stream` (written last by " + b->operation + ")";
    std::free(b->memory);
  }
  c10::DataPtr allocate(size_t size) override {
    Lock l(lock);
    const bool fits = statistics[device_index].allocated_bytes[0].current + size <= kMemory;
    TORCH_CHECK_WITH(OutOfMemoryError, fits, "virtual out of memory. Tried to allocate ", size, " bytes.");
    for_bytes(device_index, [&](auto& bytes) { bytes.increase(size); });
    void* memory = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    if (memory) std::memset(memory, 0xFF, size);  // NaN, since nobody may count on zeros
    auto* block = new Block{memory, size, device_index, current_stream(device_index)};
    return {memory, block, &release, Device(kType, device_index)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    Lock l(lock);
    if (data.get_context()) static_cast<Block*>(data.get_context())->recorded.insert(index_of(stream));
  }
  Stats getDeviceStats(c10::DeviceIndex d) override {
    Lock l(lock);
    return statistics[d];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    Lock l(lock);
    for_bytes(d, [](auto& bytes) { bytes.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    Lock l(lock);
    return {kMemory - statistics[d].allocated_bytes[0].current, kMemory};
  }
};
static Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);
struct PinnedAllocator final : c10::Allocator {
  static void release(void* memory) {
    { Lock l(lock); pinned.erase(memory); }
    std::free(memory);
  }
  c10::DataPtr allocate(size_t size) override {
    void* memory = std::aligned_alloc(64, size / 64 * 64 + 64);
    Lock l(lock);
    pinned.insert(memory);
    return {memory, memory, &release, Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

// -------------------------------------------------------------------------------- devices, streams, events, generators
struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
  bool was_queried = false;  // it is not finished when it is queried first, unless the host has waited
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
  static Stream stream(Device d, int index) { return Stream(Stream::UNSAFE, device(index_of(d)), index); }
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return device(device_index); }
  void setDevice(Device d) const override { set_device(index_of(d)); }
  void uncheckedSetDevice(Device d) const noexcept override { device_index = index_of(d); }
  Device exchangeDevice(Device d) const override { Device before = getDevice(); setDevice(d); return before; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device d) const override { return stream(d, streams[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getNewStream(Device d, int) const override { return stream(d, new_stream(index_of(d))); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    return stream(s.device(), exchange_stream(s.device_index(), static_cast<int>(s.id())));
  }
  bool queryStream(const Stream& s) const override { return is_finished(clock_of(index_of(s))); }
  void synchronizeStream(const Stream& s) const override { host_waits(clock_of(index_of(s)), "stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    Clock all{};
    for (int s = 0; s < kStreams; s++) merge(all, clock_of(index_of(device(d)) * kStreams + s));
    host_waits(all, "device.synchronize");
  }
  void record(void** event, const Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    destroyEvent(*event, 0);
    *event = new Event{clock_of(index_of(s)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& s) const override {
    if (event) stream_waits(index_of(s), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    return !e || is_known(e->clock) || (std::exchange(e->was_queried, true) && is_finished(e->clock));
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock, "event.synchronize");
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *a = static_cast<Event*>(from), *b = static_cast<Event*>(to);
    return std::chrono::duration<double, std::milli>(b->time - a->time).count();
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    allocator.recordStream(data, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {
  at::Generator on_cpu = at::detail::createCPUGenerator();
  explicit Generator(int d) : GeneratorImpl(Guard::device(d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override { return on_cpu.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { on_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};
static const at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>;
  Lock l(lock);
  while (all->size() < kDevices) all->push_back(at::make_generator<Generator>(static_cast<int>(all->size())));
  return (*all)[device];
}
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return device_index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice(Guard::device(d)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    return default_generator(index_of(Guard::device(d)));
  }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(index_of(Guard::device(d)));
  }
  bool isPinnedPtr(const void* memory) const override { Lock l(lock); return pinned.count(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { static PinnedAllocator all; return &all; }
};

// --------------------------------------------------------------------------------------------------------- operators
static Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}
static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}
static Tensor to_device(const Tensor& result, Device device) {
  if (!result.defined()) return result;
  const Tensor dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
  Tensor out = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(device));
  Tensor view = host_view(out);
  at::native::copy_(view, dense, false);
  return out;
}
// A tensor in host memory carries a key of its own while a copy into it is pending, so that its readers pass here.
constexpr auto kUnread = c10::DispatchKey::TESTING_ONLY_GenericWrapper;
struct Keys : c10::TensorImpl { using c10::TensorImpl::key_set_; };
static c10::DispatchKeySet& keys_of(const Tensor& t) { return t.unsafeGetTensorImpl()->*(&Keys::key_set_); }
static void defer_host_memory(const std::shared_ptr<Pending>& pending, const Tensor& tensor) {
  const auto size = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  std::memset(tensor.data_ptr(), 0xFF, size);
  pending->host_memory = tensor.storage().unsafeGetStorageImpl();
  defer(pending, {});
  keys_of(tensor) = keys_of(tensor).add(kUnread);
}
static bool is_pending(const Tensor& tensor) {
  Lock l(lock);
  for (auto& p : pendings) if (p->host_memory == tensor.storage().unsafeGetStorageImpl() && !p->is_settled) return true;
  return false;
}
template <class F> static void replace_tensors(c10::IValue& value, F&& replace) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = replace(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); i++) {
      c10::IValue item = list.get(i);
      replace_tensors(item, replace);
      list.set(i, item);
    }
    value = list;
  }
}
static void check_reads(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const auto& arguments = op.schema().arguments();
  const bool is_leaf = !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  Tensors unread;
  for (size_t i = 0; i < arguments.size(); i++)
    replace_tensors((*stack)[stack->size() - arguments.size() + i], [&](const Tensor& t) {
      if (keys_of(t).has(kUnread) && !is_pending(t)) keys_of(t) = keys_of(t).remove(kUnread);
      if (!keys_of(t).has(kUnread)) return t;
      const bool reads = !arguments[i].alias_info() && arguments[i].name() != "dst" && name != "aten::is_pinned";
      TORCH_CHECK(!(reads && is_leaf), "virtual: unread copy: `", name, "` reads host memory into which a device is ",
                  "still copying. Wait for an event recorded behind the copy.");
      unread.push_back(t);
      return t;
    });
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kUnread), stack);
  const size_t returns = op.schema().returns().size();
  for (size_t i = 0; i < returns; i++)
    replace_tensors((*stack)[stack->size() - returns + i], [&](const Tensor& result) {
      for (auto& t : unread) if (result.is_alias_of(t)) keys_of(result) = keys_of(result).add(kUnread);
      return result;
    });
}
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&check_reads>());
}

static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!from.numel()) return to;
  const Tensor source = from.is_cpu() ? from : host_view(from);
  Tensor target = to.is_cpu() ? to : host_view(to);
  const Device device = from.is_cpu() ? to.device() : from.device();
  const int stream = current_stream(device.index());
  const bool is_between = !from.is_cpu() && !to.is_cpu() && from.device() != to.device();
  const std::string direction = from.is_cpu() ? "to the device" : to.is_cpu() ? "to the host" : "between devices";
  if (from.is_cpu() || to.is_cpu() || is_between) {
    count("copies " + direction);
    count("bytes " + direction, static_cast<int64_t>(from.nbytes()));
  }
  // Like CUDA, copy between devices on the stream of the source, with the other one stopped meanwhile.
  const int other = current_stream(to.is_cpu() ? device.index() : to.device().index());
  if (is_between) stream_waits(stream, clock_of(other));
  const uint64_t number = launched("a copy " + direction, {from}, {to}, stream);
  if (is_between) stream_waits(other, clock_of(stream));
  if (to.is_cpu() && non_blocking && to.is_pinned()) {
    auto pending = std::make_shared<Pending>();
    Tensor value = at::native::clone(source, std::nullopt);
    pending->stream = stream;
    pending->number = number;
    pending->finish = [target, value]() mutable {
      at::AutoDispatchBelowADInplaceOrView below;
      at::native::copy_(target, value, false);
    };
    defer_host_memory(pending, to);
    return to;
  }
  at::native::copy_(target, source, false);
  if (to.is_cpu() || (from.is_cpu() && !non_blocking)) host_waits(clock_of(stream), ("copy " + direction).c_str());
  return to;
}
static at::Scalar local_scalar_dense(const Tensor& tensor) {
  const int stream = current_stream(tensor.device().index());
  const Tensor view = host_view(tensor);
  launched("`item`", {tensor}, {}, stream);
  host_waits(clock_of(stream), "item");
  return at::native::_local_scalar_dense_cpu(view);
}
static std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const auto is_kept = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), is_kept.fill_(true)};
  is_kept.bernoulli_(1 - p);
  return {input * is_kept * (p < 1 ? 1 / (1 - p) : 0), is_kept};
}
static const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

// All other operators compute in host memory what CUDA would compute, if CUDA would take the arguments.
static const std::set<std::string> kHostArguments = {"indices", "lengths", "batch_sizes"};
static const std::set<std::string> kWaiting = {  // the shape of the result, or the result, depends on values
    "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount",
    "aten::unique_consecutive", "aten::repeat_interleave"};
constexpr auto kTwoDevices = "Expected all tensors to be on the same device, but found at least two devices, ";
static void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const auto& arguments = op.schema().arguments();
  static const auto kOptionalGenerator = c10::OptionalType::create(c10::GeneratorType::get());
  c10::IValue* values = stack->data() + stack->size() - arguments.size();
  at::AutoDispatchBelowADInplaceOrView below;
  Device device(at::kCPU);
  bool has_host_tensor = false;
  Tensors reads, writes, tensors, views;
  std::vector<size_t> outs;
  for (size_t i = 0; i < arguments.size(); i++) {
    const bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    replace_tensors(values[i], [&](const Tensor& t) {
      if (!t.is_privateuseone()) {
        has_host_tensor |= (t.dim() || is_written) && !kHostArguments.count(arguments[i].name());
        return t;
      }
      TORCH_CHECK(device.is_cpu() || device == t.device(), kTwoDevices, device, " and ", t.device(), "! (", name, ")");
      device = t.device();
      (is_written ? writes : reads).push_back(t);
      tensors.push_back(t);
      if (arguments[i].is_out()) outs.push_back(views.size());  // the result may have another shape
      views.push_back(arguments[i].is_out() ? at::empty({0}, t.options().device(at::kCPU)) : host_view(t));
      return views.back();
    });
    if (!values[i].isDevice()) continue;
    if (device.is_cpu()) device = values[i].toDevice();
    values[i] = Device(at::kCPU);
  }
  TORCH_CHECK(!has_host_tensor || device.is_cpu(), kTwoDevices, device, " and cpu! (", name, ")");
  if (!device.is_privateuseone() || !device.has_index()) device = Guard::device(device_index);
  if (device.index() != device_index) count("kernels on another device than the current one");
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!arguments[i].type()->isSubtypeOf(*kOptionalGenerator)) continue;
    const auto& generator = values[i].isGenerator() ? values[i].toGenerator() : default_generator(device.index());
    TORCH_CHECK(generator.device().type() == kType, "Expected a 'virtual' device type for generator but found 'cpu'");
    values[i] = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->on_cpu;
  }
  op.callBoxed(stack);
  for (size_t k : outs) {
    if (views[k].sizes() != tensors[k].sizes()) tensors[k].resize_(views[k].sizes());
    Tensor target = host_view(tensors[k]);
    at::native::copy_(target, views[k], false);
  }
  bool is_view = false;
  const size_t returns = op.schema().returns().size();
  for (size_t i = 0; i < returns; i++)
    replace_tensors((*stack)[stack->size() - returns + i], [&](const Tensor& result) {
      for (size_t k = 0; k < tensors.size(); k++) if (result.is_same(views[k])) return tensors[k];
      for (size_t k = 0; k < tensors.size(); k++) if (result.is_alias_of(views[k])) {
        is_view = true;
        const auto offset = tensors[k].storage_offset() + result.storage_offset();
        return at::cpu::as_strided(tensors[k], result.sizes(), result.strides(), offset);
      }
      writes.push_back(to_device(result, device));
      return writes.back();
    });
  if (is_view) return;
  const int stream = current_stream(device.index());
  launched("`" + name + "`", reads, writes, stream);
  if (kWaiting.count(name)) host_waits(clock_of(stream), name.c_str());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"convolution", "convolution_backward"})  // composite, and so without a way to the fallback
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  using Sizes = c10::SymIntArrayRef;
  m.impl("as_strided", [](const Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> at) {
    return at::cpu::as_strided_symint(self, size, stride, at);
  });
  m.impl("resize_", resize);
  m.impl("set_.source_Storage",
         [](Tensor& self, c10::Storage from) -> Tensor& { return at::native::set_(self, from); });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& self, c10::Storage from, int64_t at, at::IntArrayRef size, at::IntArrayRef stride) -> Tensor& {
           return at::cpu::set_(self, from, at, size, stride);
         });
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize",
         [](const Tensor& from, const Tensor& to) { return copy_from(from, to.resize_(from.sizes()), false); });
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", [](Tensor& tensor, Stream stream) { record(tensor, index_of(stream)); });
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
}  // namespace virtual_accelerator
namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
}
}  // namespace at::autocast

void bind_process_group(pybind11::module& m);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace virtual_accelerator;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.attr("device_count") = kDevices;
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("counts", [] { Lock l(lock); return counters; });
  m.def("check", &raise_failure);
  m.def("reset", [] { Lock l(lock); counters.clear(); failure.clear(); forbids_host_waits = false; });
  m.def("forbid_host_waits", [](bool on) { forbids_host_waits = on; });
  bind_process_group(m);
}
