// What a CUDA driver keeps: devices, memory, streams, events, and what becomes of them in forks.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>
#include <unordered_map>

namespace pretended {

constexpr int MAX_DEVICES = 16;
constexpr size_t BLOCK_BYTES = 512;  // the caching allocator's smallest block
constexpr int64_t STREAMS_PER_PRIORITY = 32;

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoll(value) : otherwise;
}
inline int num_devices() {
  static const int count = std::min<int64_t>(setting("PRETENDED_CUDA_DEVICES", 2), MAX_DEVICES);
  return count;
}
inline int64_t capacity_bytes() {
  static const int64_t bytes = setting("PRETENDED_CUDA_MEMORY_BYTES", 80ll << 30);
  return bytes;
}

// --- Forks: a process whose parent used the driver can't use it. ----------------------------------------------------
inline std::atomic<bool> driver_used{false}, in_bad_fork{false};
inline std::string (*where)() = nullptr;  // says who calls
inline std::string first_use;             // who used the driver first

inline void use_driver() {
  TORCH_CHECK(!in_bad_fork, "CUDA error: initialization error");
  if (driver_used.exchange(true)) return;
  if (where) first_use = where();
  pthread_atfork(nullptr, nullptr, [] { in_bad_fork = true; });
}

// --- What the host asks of a device. --------------------------------------------------------------------------------
// reads: the host waits for values. uploads: from the host; blocking where it waits for them, pageable where the memory
// isn't pinned. waits: for a stream, an event or a device. kernels: calls of operators.
struct Counters {
  std::atomic<int64_t> reads{0}, uploads{0}, blocking_uploads{0}, pageable_uploads{0}, waits{0}, kernels{0};
};
inline Counters counters;

inline thread_local int current_device = 0;
inline thread_local std::array<int64_t, MAX_DEVICES> current_stream{};

inline void check_device(int64_t index) {
  TORCH_CHECK(index >= 0 && index < num_devices(), "CUDA error: invalid device ordinal");
}
inline void set_device(int64_t index) {
  if (index < 0) return;
  use_driver();
  check_device(index);
  current_device = static_cast<int>(index);
}

struct OnDevice {  // the current device, for a while
  int before = current_device;
  explicit OnDevice(std::optional<c10::Device> device) {
    if (device && device->has_index()) set_device(device->index());
  }
  ~OnDevice() { current_device = before; }
};

// --- Memory ---------------------------------------------------------------------------------------------------------
using c10::CachingDeviceAllocator::DeviceStats;

struct Memory {
  std::mutex lock;
  DeviceStats stats;
};
inline std::array<Memory, MAX_DEVICES> memories;

inline void each(c10::CachingAllocator::StatArray& stat, bool is_large, bool is_more, size_t amount) {
  for (size_t kind : {size_t(0), size_t(is_large ? 2 : 1)}) is_more ? stat[kind].increase(amount) : stat[kind].decrease(amount);
}
inline std::string mebibytes(int64_t bytes) {
  char text[32];
  bool is_large = bytes >= (1ll << 30);
  std::snprintf(text, sizeof text, is_large ? "%.2f GiB" : "%.2f MiB", bytes / (is_large ? 1073741824.0 : 1048576.0));
  return text;
}

// Takes bytes of a device's capacity. Returns what is taken: whole blocks.
inline int64_t take(int device, int64_t bytes) {
  int64_t rounded = (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
  auto& memory = memories[device];
  std::lock_guard<std::mutex> held(memory.lock);
  auto& stats = memory.stats;
  int64_t used = stats.allocated_bytes[0].current;
  if (used + rounded > capacity_bytes()) {
    stats.num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", mebibytes(rounded), ". GPU ", device,
                     " has a total capacity of ", mebibytes(capacity_bytes()), " of which ", mebibytes(capacity_bytes() - used),
                     " is free. Of the allocated memory ", mebibytes(used), " is allocated by PyTorch.");
  }
  bool is_large = rounded > (1 << 20);
  each(stats.allocation, is_large, true, 1);
  each(stats.active, is_large, true, 1);
  each(stats.allocated_bytes, is_large, true, rounded);
  each(stats.active_bytes, is_large, true, rounded);
  each(stats.requested_bytes, is_large, true, bytes);
  int64_t cached = stats.reserved_bytes[0].current;
  if (used + rounded > cached) each(stats.reserved_bytes, is_large, true, used + rounded - cached);
  return rounded;
}
inline void give_back(int device, int64_t bytes) {
  int64_t rounded = (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
  bool is_large = rounded > (1 << 20);
  auto& memory = memories[device];
  std::lock_guard<std::mutex> held(memory.lock);
  each(memory.stats.allocation, is_large, false, 1);
  each(memory.stats.active, is_large, false, 1);
  each(memory.stats.allocated_bytes, is_large, false, rounded);
  each(memory.stats.active_bytes, is_large, false, rounded);
  each(memory.stats.requested_bytes, is_large, false, bytes);
}

inline const c10::impl::PyInterpreter* tracer() { return c10::impl::GPUTrace::get_trace(); }

// Memory of the host that counts as a device's: `own` where it was taken for it, `adopted` where a CPU kernel made it.
struct Block {
  void* own;
  c10::Storage adopted;
  int64_t bytes;
  int device;
  void* data;
  Block(void* own, c10::Storage adopted, int64_t bytes, int device, void* data)
      : own(own), adopted(std::move(adopted)), bytes(bytes), device(device), data(data) {}
  ~Block() {
    if (auto trace = tracer()) (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(data));
    std::free(own);
    give_back(device, bytes);
  }
};
// Blocks by their memory, which is all that a DataPtr knows, as of CUDA's allocator: else torch would let no two tensors
// share it until one of them is written to. They outlive what is freed when the process ends.
inline std::mutex& blocks_lock = *new std::mutex;
inline auto& blocks = *new std::unordered_map<void*, std::unique_ptr<Block>>;

inline void free_block(void* data) {
  std::unique_ptr<Block> freed;
  std::lock_guard<std::mutex> held(blocks_lock);
  auto found = blocks.find(data);
  freed = std::move(found->second);
  blocks.erase(found);
}
inline c10::DataPtr block(int device, int64_t bytes, c10::Storage adopted = {}) {
  use_driver();
  c10::Device on(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  if (!bytes) return {nullptr, on};
  take(device, bytes);
  void* own = adopted ? nullptr : std::malloc(bytes);
  void* data = adopted ? adopted.mutable_data() : own;
  if (auto trace = tracer()) (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(data));
  std::lock_guard<std::mutex> held(blocks_lock);
  auto [place, is_new] = blocks.emplace(data, std::make_unique<Block>(own, std::move(adopted), bytes, device, data));
  TORCH_INTERNAL_ASSERT(is_new, "memory of the host counts as two blocks of a device");
  return {data, data, &free_block, on};
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return block(current_device, static_cast<int64_t>(bytes)); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return driver_used; }
  void emptyCache(c10::MempoolId_t) override {
    for (auto& memory : memories) {
      std::lock_guard<std::mutex> held(memory.lock);
      int64_t unused = memory.stats.reserved_bytes[0].current - memory.stats.allocated_bytes[0].current;
      if (unused > 0) memory.stats.reserved_bytes[0].decrease(unused);
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_device(device);
    std::lock_guard<std::mutex> held(memories[device].lock);
    return memories[device].stats;
  }
  template <typename Change>
  static void change(c10::DeviceIndex device, Change apply) {
    check_device(device);
    std::lock_guard<std::mutex> held(memories[device].lock);
    auto& stats = memories[device].stats;
    for (auto* stat : {&stats.allocation, &stats.active, &stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
                       &stats.requested_bytes})
      for (auto& part : *stat) apply(part);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { change(device, [](auto& stat) { stat.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex device) override { change(device, [](auto& stat) { stat.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    use_driver();
    return {capacity_bytes() - getDeviceStats(device).reserved_bytes[0].current, capacity_bytes()};
  }
};
inline Allocator allocator;

// Pinned memory is the host's, of which it is known that it is pinned.
inline std::mutex pinned_lock;
inline std::set<std::pair<uintptr_t, uintptr_t>> pinned;  // end and beginning of each range

inline bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto address = reinterpret_cast<uintptr_t>(data);
  auto range = pinned.upper_bound({address, UINTPTR_MAX});
  return range != pinned.end() && range->second <= address;
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    use_driver();
    void* data = bytes ? std::malloc(bytes) : nullptr;
    auto begin = reinterpret_cast<uintptr_t>(data);
    std::lock_guard<std::mutex> held(pinned_lock);
    if (bytes) pinned.insert({begin + bytes, begin});
    auto* range = new std::pair<uintptr_t, uintptr_t>(begin + bytes, begin);
    return {data, range, [](void* context) {
      auto* range = static_cast<std::pair<uintptr_t, uintptr_t>*>(context);
      std::lock_guard<std::mutex> held(pinned_lock);
      pinned.erase(*range);
      std::free(reinterpret_cast<void*>(range->second));
      delete range;
    }, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
inline PinnedAllocator pinned_allocator;

// --- Random numbers: a seed and an offset that each kernel moves on, as Philox; a kernel draws with the CPU's engine. --
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl({c10::kCUDA, device}, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  static c10::DeviceType device_type() { return c10::kCUDA; }
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom(true)); return seed_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state is wrong size");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  // For one kernel.
  at::Generator draw() {
    std::lock_guard<std::mutex> held(mutex_);
    auto made = at::detail::createCPUGenerator(seed_ + offset_ * 0x9E3779B97F4A7C15ull);
    offset_ += 4;
    return made;
  }
};
inline const at::Generator& default_generator(int64_t device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < MAX_DEVICES; ++index) made.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index)));
    return made;
  }();
  return generators[device < 0 ? current_device : device];
}

// --- Streams and events: work is done where it is asked for, so that all of them have always caught up. ----------------
struct Event {
  std::chrono::steady_clock::time_point time;
};
inline int64_t new_stream(int64_t device, int priority) {
  static std::array<std::array<std::atomic<int64_t>, 2>, MAX_DEVICES> counts{};
  int64_t number = counts[device][priority < 0]++ % STREAMS_PER_PRIORITY;
  int64_t stream = 1 + number + (priority < 0 ? STREAMS_PER_PRIORITY : 0);
  if (auto trace = tracer()) (*trace)->trace_gpu_stream_creation(c10::kCUDA, stream);
  return stream;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::Device device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  static c10::Device indexed(c10::Device device) {
    return {c10::kCUDA, device.has_index() ? device.index() : static_cast<c10::DeviceIndex>(current_device)};
  }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (device.index() != before.index()) setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    device = indexed(device);
    return stream(device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(indexed(device), 0); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    use_driver();
    device = indexed(device);
    return stream(device, new_stream(device.index(), priority));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high) const override { return getNewStream(device, is_high ? -1 : 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream given) const override { return reinterpret_cast<void*>(given.id()); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (!event) return;
    if (auto trace = tracer()) (*trace)->trace_gpu_event_deletion(c10::kCUDA, reinterpret_cast<uintptr_t>(event));
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    use_driver();
    auto trace = tracer();
    if (!*event) {
      *event = new Event{};
      if (trace) (*trace)->trace_gpu_event_creation(c10::kCUDA, reinterpret_cast<uintptr_t>(*event));
    }
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
    if (trace) (*trace)->trace_gpu_event_record(c10::kCUDA, reinterpret_cast<uintptr_t>(*event), on.id());
  }
  void block(void* event, const c10::Stream& on) const override {
    auto trace = tracer();
    if (event && trace) (*trace)->trace_gpu_event_wait(c10::kCUDA, reinterpret_cast<uintptr_t>(event), on.id());
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    ++counters.waits;
    auto trace = tracer();
    if (event && trace) (*trace)->trace_gpu_event_synchronization(c10::kCUDA, reinterpret_cast<uintptr_t>(event));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& on) const override {
    ++counters.waits;
    if (auto trace = tracer()) (*trace)->trace_gpu_stream_synchronization(c10::kCUDA, on.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    use_driver();
    ++counters.waits;
    if (auto trace = tracer()) (*trace)->trace_gpu_device_synchronization(c10::kCUDA);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    if (in_bad_fork) return 0;
    if (!driver_used) use_driver();  // counting devices begins to use the driver
    return static_cast<c10::DeviceIndex>(num_devices());
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    auto passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
}  // namespace pretended

namespace at {
// Registered under torch's own name, as torch's CUDA library would.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override { pretended::use_driver(); }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return pretended::num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return pretended::driver_used; }
  DeviceIndex deviceCount() const override { pretended::use_driver(); return static_cast<DeviceIndex>(pretended::num_devices()); }
  int getNumGPUs() const override { return deviceCount(); }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(pretended::current_device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { pretended::set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current_device();
    pretended::set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  Device getDeviceFromPtr(void*) const override { return {kCUDA, current_device()}; }
  bool isPinnedPtr(const void* data) const override { return pretended::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pretended::pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &pretended::allocator; }
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return pretended::default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<pretended::Generator>(device < 0 ? current_device() : device);
  }
  long versionCuDNN() const override { return 0; }
  void deviceSynchronize(DeviceIndex device) const override { pretended::Guard().synchronizeDevice(device); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
}  // namespace at

namespace pretended {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
inline const bool allocator_is_set = (c10::SetAllocator(c10::kCUDA, &allocator, 255), true);
}  // namespace pretended
