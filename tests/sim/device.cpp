// A simulated accelerator: PrivateUse1, with streams, events, a caching allocator and host memory that can be locked.
//
// - Device memory has addresses of its own, at which nothing can be read or written: an access by host code ends the
//   process. Each address stands for one in another mapping, which only tasks of streams know.
// - A stream is a thread. Each kernel, copy and wait is a task of it, so nothing is ordered but by streams and events.
//   A kernel is torch's own for the CPU. Its task has addresses alone: freed memory is not kept for it.
// - The allocator has free lists for each stream. It overwrites freed memory, in the order of its stream, and lends it
//   again at once. Memory that `record_stream` has named is freed when these streams have reached this point.
// - Tasks may be delayed, by a seed, or held; the device may have no memory, or an error that stays.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using Stack = torch::jit::Stack;
using Lock = std::unique_lock<std::mutex>;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kStreams = 33; // the default stream of a device, and those that it hands out in turn
constexpr size_t kArenaBytes = size_t(16) << 30; // of addresses; pages exist once they are used
constexpr size_t kRounding = 512;
constexpr unsigned char kPoison = 0xDB;

enum Kind { KERNEL, TO_HOST, FROM_HOST, FREE, REGISTER, KINDS };

// Waiting with the GIL would keep out what is waited for.
struct WithoutGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// --- what the tests set ---------------------------------------------------------------------------

struct Settings {
  std::atomic<uint64_t> random{1};
  std::atomic<int64_t> delay_us[KINDS] = {}; // at most
  std::atomic<int64_t> fault_after[KINDS] = {}; // tasks until one fails; 0: none fails
  std::atomic<int64_t> out_of_memory_after{0}, out_of_memory_count{0};
  std::atomic<int> registration_error{0};
  std::atomic<int64_t> counts[KINDS] = {};
  std::atomic<int64_t> reused{0}, deferred{0}, refused{0}, kept_bytes{0};

  std::mutex mutex;
  std::condition_variable changed;
  std::set<int> held; // kinds of tasks that wait
  std::set<std::pair<int, int>> held_streams;
  std::string error; // it stays
  std::vector<std::string> misuses;
  bool ends = false;

  uint64_t next_random() { // splitmix64
    uint64_t z = random += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  void delay(Kind kind) { delay_by(delay_us[kind]); }

  void delay_by(int64_t most) {
    if (most <= 0) return;
    // Half of the tasks are not delayed at all; else all would be late alike.
    uint64_t drawn = next_random();
    if (drawn & 1) std::this_thread::sleep_for(std::chrono::microseconds((drawn >> 1) % most));
  }

  bool is_faulty(Kind kind) {
    return fault_after[kind] > 0 && --fault_after[kind] == 0;
  }

  void fail(const std::string& what) {
    Lock lock(mutex);
    if (error.empty()) error = what;
  }

  void misuse(const std::string& what) {
    Lock lock(mutex);
    misuses.push_back(what);
  }

  bool has_failed() {
    Lock lock(mutex);
    return !error.empty();
  }

  void check() {
    Lock lock(mutex);
    TORCH_CHECK(error.empty(), "sim error: ", error);
  }
};

// Never destroyed: threads of streams use it until the process ends.
Settings& settings = *new Settings;

// --- streams and events ---------------------------------------------------------------------------

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;
  bool is_captured = false;

  void reach(uint64_t version) {
    Lock lock(mutex);
    reached = std::max(reached, version);
    changed.notify_all();
  }
  void wait(uint64_t version) {
    Lock lock(mutex);
    changed.wait(lock, [&] { return reached >= version; });
  }
  bool is_reached(uint64_t version) {
    Lock lock(mutex);
    return reached >= version;
  }
};
using EventPtr = std::shared_ptr<Event>;

struct Task {
  Kind kind;
  std::function<void()> run;
  bool is_wait = false; // or an event: goes on whatever has failed
};

struct SimStream {
  const int device, number;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  uint64_t issued = 0, done = 0;
  bool captures = false;
  std::string invalid; // why the capture is
  std::vector<Task> captured;

  SimStream(int device, int number) : device(device), number(number) {
    std::thread([this] { work(); }).detach();
  }

  void push(Task task) {
    Lock lock(mutex);
    if (captures) {
      if (!task.is_wait) captured.push_back(std::move(task));
      return;
    }
    tasks.push_back(std::move(task));
    issued++;
    changed.notify_all();
  }

  void invalidate(const std::string& why) {
    Lock lock(mutex);
    if (invalid.empty()) invalid = why;
  }

  void synchronize() {
    WithoutGil released;
    if (captures) {
      invalidate("a wait for the stream that captures");
      TORCH_CHECK(false, "sim error: operation not permitted when stream is capturing");
    }
    Lock lock(mutex);
    uint64_t wanted = issued;
    changed.wait(lock, [&] { return done >= wanted; });
  }

  void work() {
    pthread_setname_np(pthread_self(), "sim-stream");
    at::AutoDispatchBelowADInplaceOrView guard;
    at::set_num_threads(1);
    for (;;) {
      Task task;
      {
        Lock lock(mutex);
        changed.wait(lock, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      run(task);
      task = {}; // what it holds ends before anybody sees that it is done
      Lock lock(mutex);
      done++;
      changed.notify_all();
    }
  }

  void run(Task& task) {
    if (task.is_wait) return task.run();
    {
      Lock lock(settings.mutex);
      settings.changed.wait(lock, [&] {
        return settings.ends || !(settings.held.count(task.kind) || settings.held_streams.count({device, number}));
      });
    }
    settings.delay(task.kind);
    if (settings.is_faulty(task.kind)) settings.fail("an illegal memory access was encountered");
    if (settings.has_failed()) return;
    try {
      task.run();
    } catch (const std::exception& exc) {
      settings.fail(exc.what());
    }
  }
};

std::mutex streams_mutex;
SimStream* all_streams[kDevices][kStreams] = {};
std::atomic<int> next_stream[kDevices] = {};
std::atomic<pid_t> owner{0};
thread_local int current_device = 0;
thread_local int current_streams[kDevices] = {};
thread_local int64_t launch_delay_us = 0; // at most

SimStream& stream_at(int device, int number) {
  Lock lock(streams_mutex);
  if (!owner) owner = getpid();
  TORCH_CHECK(owner == getpid(), "sim error: a forked child can't use the device of its parent");
  auto& stream = all_streams[device][number];
  if (!stream) stream = new SimStream(device, number);
  return *stream;
}

SimStream& stream_of(const c10::Stream& stream) {
  return stream_at(stream.device_index(), static_cast<int>(stream.id()));
}

SimStream& current_stream(int device) {
  return stream_at(device, current_streams[device]);
}

template <class Function>
void each_stream(Function function) {
  std::vector<SimStream*> found;
  {
    Lock lock(streams_mutex);
    for (auto& row : all_streams)
      for (auto* stream : row)
        if (stream) found.push_back(stream);
  }
  for (auto* stream : found) function(*stream);
}

void launch(SimStream& stream, Kind kind, std::function<void()> run) {
  settings.check();
  settings.counts[kind]++;
  if (launch_delay_us > 0) {
    WithoutGil released;
    settings.delay_by(launch_delay_us);
  }
  stream.push({kind, std::move(run)});
}

uint64_t record(const EventPtr& event, SimStream& stream) {
  uint64_t version;
  {
    Lock lock(event->mutex);
    event->is_captured = stream.captures;
    version = ++event->recorded;
  }
  stream.push({KERNEL, [event, version] { event->reach(version); }, true});
  return version;
}

void wait_for(const EventPtr& event, SimStream& stream) {
  uint64_t version;
  bool is_captured;
  {
    Lock lock(event->mutex);
    version = event->recorded;
    is_captured = event->is_captured;
  }
  if (is_captured != stream.captures && version) {
    each_stream([](SimStream& each) {
      if (each.captures) each.invalidate("a wait that crosses the border of the capture");
    });
    TORCH_CHECK(!stream.captures, "sim error: dependency created on uncaptured work in another stream");
    return;
  }
  if (version) stream.push({KERNEL, [event, version] { event->wait(version); }, true});
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device getDevice() const override { return Device(kSim, current_device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "sim error: there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream made(Device device, int number) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(kSim, index(device)), number);
  }
  static DeviceIndex index(Device device) {
    return device.index() < 0 ? static_cast<DeviceIndex>(current_device) : device.index();
  }
  c10::Stream getStream(Device device) const override { return made(device, current_streams[index(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return made(device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    return made(device, 1 + next_stream[index(device)]++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = static_cast<int>(stream.id());
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    auto& found = stream_of(stream);
    Lock lock(found.mutex);
    return found.done == found.issued;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    stream_of(stream).synchronize();
    settings.check();
  }
  void synchronizeDevice(DeviceIndex device) const override {
    each_stream([&](SimStream& stream) {
      if (stream.device == device) stream.synchronize();
    });
    settings.check();
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return stream_of(stream).captures; }

  static EventPtr& event_of(void* event) { return *static_cast<EventPtr*>(event); }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    settings.check();
    if (!*event) *event = new EventPtr(std::make_shared<Event>());
    ::record(event_of(*event), stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_for(event_of(event), stream_of(stream));
  }
  bool queryEvent(void* event) const override {
    return !event || event_of(event)->is_reached(event_of(event)->recorded);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    WithoutGil released;
    auto found = event_of(event);
    if (found->is_captured) {
      each_stream([](SimStream& each) {
        if (each.captures) each.invalidate("a wait for an event of the capture");
      });
      TORCH_CHECK(false, "sim error: operation not permitted on an event last recorded in a capturing stream");
    }
    found->wait(found->recorded);
    settings.check();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override;
};

// --- memory ---------------------------------------------------------------------------------------

struct Block {
  char* address;
  size_t nbytes;
  int device, stream;
  std::set<int> users; // the streams that `record_stream` has named
};

struct Arena {
  char* device = nullptr; // where nothing can be read
  char* host = nullptr;
  size_t used = 0;
};

char* map(int protection) {
  void* found = mmap(nullptr, kArenaBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != MAP_FAILED, "sim error: no address space");
  madvise(found, kArenaBytes, MADV_DONTFORK);
  return static_cast<char*>(found);
}

struct SimAllocator final : c10::Allocator {
  std::mutex mutex;
  Arena arenas[kDevices];
  std::map<std::tuple<int, int, size_t>, std::vector<Block*>> free_lists;
  std::vector<std::pair<Block*, std::vector<std::pair<EventPtr, uint64_t>>>> pending;

  SimAllocator() {
    for (auto& arena : arenas) arena.device = map(PROT_NONE), arena.host = map(PROT_READ | PROT_WRITE);
  }

  // The address at which a stream's thread finds memory of the device.
  char* host_address(const void* address) const {
    auto* at = static_cast<const char*>(address);
    for (const auto& arena : arenas)
      if (at >= arena.device && at < arena.device + kArenaBytes) return arena.host + (at - arena.device);
    TORCH_CHECK(false, "sim error: this is not an address of the device");
  }

  c10::DataPtr allocate(size_t nbytes) override {
    int device = current_device;
    if (!nbytes) return {nullptr, nullptr, &release, Device(kSim, device)};
    settings.check();
    if (settings.out_of_memory_after > 0 && --settings.out_of_memory_after == 0) {
      if (--settings.out_of_memory_count > 0) settings.out_of_memory_after = 1;
      settings.refused++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory: tried to allocate ", nbytes, " bytes");
    }
    int stream = current_stream(device).number;
    size_t size = (nbytes + kRounding - 1) / kRounding * kRounding;
    Lock lock(mutex);
    free_pending();
    auto& list = free_lists[{device, stream, size}];
    Block* block;
    if (!list.empty()) {
      block = list.back();
      list.pop_back();
      settings.reused++;
    } else {
      auto& arena = arenas[device];
      TORCH_CHECK_WITH(OutOfMemoryError, arena.used + size <= kArenaBytes, "sim out of memory");
      block = new Block{arena.device + arena.used, size, device, stream, {}};
      memset(arena.host + arena.used, kPoison, size); // never used before, so no stream knows it
      arena.used += size;
      settings.kept_bytes += size;
    }
    return {block->address, block, &release, Device(kSim, device)};
  }

  static void release(void* block);

  void free(Block* block) {
    Lock lock(mutex);
    free_pending();
    std::vector<std::pair<EventPtr, uint64_t>> reached;
    for (int user : block->users) {
      if (user == block->stream) continue;
      auto event = std::make_shared<Event>();
      uint64_t version = record(event, stream_at(block->device, user));
      reached.emplace_back(event, version);
    }
    block->users.clear();
    if (reached.empty()) return give_back(block);
    settings.deferred++;
    pending.emplace_back(block, std::move(reached));
  }

  void free_pending() {
    for (size_t each = 0; each < pending.size();) {
      auto& [block, events] = pending[each];
      bool is_done = true;
      for (auto& [event, version] : events) is_done = is_done && event->is_reached(version);
      if (is_done) {
        give_back(block);
        pending.erase(pending.begin() + each);
      } else {
        each++;
      }
    }
  }

  void give_back(Block* block) {
    auto& stream = stream_at(block->device, block->stream);
    char* memory = host_address(block->address);
    size_t nbytes = block->nbytes;
    // As the next kernel of this stream would, to which the memory belongs now.
    if (!stream.captures) stream.push({FREE, [=] { memset(memory, kPoison, nbytes); }});
    settings.counts[FREE]++;
    free_lists[{block->device, block->stream, block->nbytes}].push_back(block);
  }

  void record_stream(const c10::DataPtr& memory, int device, int stream) {
    if (!memory.get_context()) return;
    Lock lock(mutex);
    auto* block = static_cast<Block*>(memory.get_context());
    TORCH_CHECK(block->device == device, "sim error: memory of another device");
    block->users.insert(stream);
  }

  void copy_data(void* target, const void* source, size_t nbytes) const override {
    char *to = host_address(target), *from = host_address(source);
    launch(current_stream(current_device), KERNEL, [=] { memcpy(to, from, nbytes); });
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
};

SimAllocator& allocator = *new SimAllocator;

void SimAllocator::release(void* block) {
  if (block && (!owner || owner == getpid())) allocator.free(static_cast<Block*>(block));
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const {
  allocator.record_stream(memory, stream.device_index(), static_cast<int>(stream.id()));
}

// --- host memory that is locked -------------------------------------------------------------------

constexpr int kAlreadyRegistered = 712, kInvalid = 1;

using Copies = std::shared_ptr<std::atomic<int>>; // the number in flight

struct Registered {
  size_t nbytes;
  Copies copies;
};

// A copy in flight until its task is dropped, run or not.
std::shared_ptr<void> in_flight(const Copies& copies) {
  ++*copies;
  return {nullptr, [copies](void*) { --*copies; }};
}

std::mutex registered_mutex;
std::map<uintptr_t, Registered> registered;

// The copies in flight of the locked memory that holds all these bytes, or null.
Copies find_registered(const void* address, size_t nbytes) {
  Lock lock(registered_mutex);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto found = registered.upper_bound(at);
  if (found == registered.begin()) return nullptr;
  --found;
  return at + nbytes <= found->first + found->second.nbytes ? found->second.copies : nullptr;
}

int register_host(uintptr_t address, size_t nbytes) {
  WithoutGil released;
  settings.counts[REGISTER]++;
  settings.delay(REGISTER);
  if (int error = settings.registration_error) return error;
  Lock lock(registered_mutex);
  auto next = registered.lower_bound(address + nbytes);
  if (next != registered.begin() && (--next)->first + next->second.nbytes > address) return kAlreadyRegistered;
  registered[address] = {nbytes, std::make_shared<std::atomic<int>>(0)};
  return 0;
}

int unregister_host(uintptr_t address) {
  Lock lock(registered_mutex);
  auto found = registered.find(address);
  if (found == registered.end()) return kInvalid;
  if (*found->second.copies) settings.misuse("host memory was unlocked while copies used it");
  registered.erase(found);
  return 0;
}

// --- operators ------------------------------------------------------------------------------------

bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// The tensor as a stream's thread sees it. Another's memory is copied: the caller may free it.
at::Tensor seen_by_stream(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!is_sim(tensor)) {
    auto copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  at::Tensor view = tensor.numel()
      ? at::from_blob(allocator.host_address(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options)
      : at::empty_strided(tensor.sizes(), tensor.strides(), options);
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor seen_by_meta(const at::Tensor& tensor) {
  if (!is_sim(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

template <class Function>
IValue with_tensors(const IValue& value, Device device, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(function(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each ? std::make_optional(function(*each)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return device;
  return value;
}

at::Tensor new_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, Device device) {
  c10::DeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, dtype);
}

// Run a kernel in a stream's thread and wait for it; its results are in host memory.
Stack run_and_wait(SimStream& stream, const c10::OperatorHandle& op, const Stack& arguments) {
  TORCH_CHECK(!stream.captures, "sim error: ", op.schema().name(), " is not permitted when stream is capturing");
  auto results = std::make_shared<Stack>();
  launch(stream, KERNEL, [op, arguments, results] {
    *results = arguments;
    op.callBoxed(results.get());
  });
  stream.synchronize();
  settings.check();
  return *results;
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  c10::DeviceGuard guard(storage->device());
  auto memory = allocator.allocate(nbytes);
  size_t kept = std::min(nbytes, storage->nbytes());
  if (kept) allocator.copy_data(memory.get(), storage->data(), kept);
  storage->set_data_ptr(std::move(memory)); // the old memory is freed
  storage->set_nbytes(nbytes);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t wanted = self.numel() ? (self.storage_offset() + self.numel()) * self.itemsize() : 0;
  if (self.storage().nbytes() < wanted) resize_storage(self.storage().unsafeGetStorageImpl(), wanted);
  return self;
}

// Give an empty result that the kernel would resize its shape: in a stream's thread, nothing can be allocated.
void resize_empty_results(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& declared = op.schema().arguments();
  for (size_t each = 0; each < declared.size(); each++) {
    if (!declared[each].is_out() || !arguments[each].isTensor() || arguments[each].toTensor().numel()) continue;
    Stack shapes;
    for (const auto& value : arguments) shapes.push_back(with_tensors(value, c10::kMeta, seen_by_meta));
    op.callBoxed(&shapes);
    return resize(arguments[each].toTensor(), shapes[0].toTensor().sym_sizes(), std::nullopt), void();
  }
}

// Run any operator: torch's kernel for the CPU, as a task of the current stream.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  std::optional<Device> device;
  bool mutates = false;
  for (size_t each = 0; each < count; each++) {
    const auto& value = arguments[each];
    auto look = [&](const at::Tensor& tensor) {
      if (is_sim(tensor) && !device) device = tensor.device();
      return tensor;
    };
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) with_tensors(value, c10::kCPU, look);
    if (!device && value.isDevice() && value.toDevice().type() == kSim) device = value.toDevice();
    const auto* alias = schema.arguments()[each].alias_info();
    mutates = mutates || (alias && alias->isWrite());
  }
  TORCH_CHECK(device, "sim error: ", schema.name(), " has no tensor on the device");
  const Device place(kSim, Guard::index(*device));
  auto& stream = current_stream(place.index());
  if (mutates) resize_empty_results(op, arguments);
  Stack seen;
  for (const auto& value : arguments) seen.push_back(with_tensors(value, c10::kCPU, seen_by_stream));

  if (mutates) {
    launch(stream, KERNEL, [op, seen] {
      Stack copy = seen;
      op.callBoxed(&copy);
    });
    torch::jit::drop(*stack, count);
    for (const auto& result : schema.returns()) {
      TORCH_CHECK(result.alias_info() && result.alias_info()->isWrite(), "sim error: ", schema.name(), " is unknown");
      for (size_t each = 0; each < count; each++) {
        const auto* alias = schema.arguments()[each].alias_info();
        if (alias && *alias == *result.alias_info()) {
          stack->push_back(arguments[each]);
          break;
        }
      }
    }
    return;
  }

  for (const auto& result : schema.returns())
    TORCH_CHECK(!result.alias_info(), "sim error: ", schema.name(), " returns a view, and has no kernel");
  Stack shapes;
  bool is_known = true;
  try {
    for (const auto& value : arguments) shapes.push_back(with_tensors(value, c10::kMeta, seen_by_meta));
    op.callBoxed(&shapes);
  } catch (const std::exception&) {
    is_known = false; // the shapes depend on values
  }
  for (const auto& each : shapes) is_known = is_known && each.isTensor() && each.toTensor().is_meta();
  if (!is_known) {
    auto results = run_and_wait(stream, op, seen);
    torch::jit::drop(*stack, count);
    for (const auto& each : results)
      stack->push_back(with_tensors(each, place, [&](const at::Tensor& tensor) { return tensor.to(place); }));
    return;
  }
  std::vector<at::Tensor> targets;
  torch::jit::drop(*stack, count);
  for (const auto& each : shapes) {
    const auto& shape = each.toTensor();
    auto result = new_tensor(shape.sizes(), shape.strides(), shape.scalar_type(), place);
    targets.push_back(seen_by_stream(result));
    stack->push_back(result);
  }
  launch(stream, KERNEL, [op, seen, targets] {
    Stack copy = seen;
    op.callBoxed(&copy);
    for (size_t each = 0; each < targets.size(); each++) targets[each].copy_(copy[each].toTensor());
  });
}

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kSim, -1)));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto shape = C10_AS_INTARRAYREF_SLOW(size);
  return at::detail::empty_generic(shape, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  auto place = device.value_or(Device(kSim, -1));
  return new_tensor(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::dtype_or_default(dtype), place);
}

// The bytes from the first to the last element.
size_t extent_of(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

at::Tensor raw_view(const at::Tensor& host) {
  auto view = at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options());
  view._set_conj(host.is_conj());
  view._set_neg(host.is_neg());
  return view;
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto& stream = current_stream(source.device().index());
  auto copies = find_registered(target.data_ptr(), extent_of(target));
  auto from = seen_by_stream(source), to = raw_view(target);
  if (!copies || !non_blocking) {
    TORCH_CHECK(!stream.captures, "sim error: a copy to pageable memory is not permitted when stream is capturing");
    launch(stream, TO_HOST, [=] { to.copy_(from); });
    stream.synchronize();
    return settings.check();
  }
  launch(stream, TO_HOST, [to, from, running = in_flight(copies)] { to.copy_(from); });
}

void copy_from_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto& stream = current_stream(target.device().index());
  auto copies = find_registered(source.data_ptr(), extent_of(source));
  auto to = seen_by_stream(target);
  if (!copies || !non_blocking) {
    auto from = seen_by_stream(source); // a copy
    return launch(stream, FROM_HOST, [=] { to.copy_(from); });
  }
  auto from = raw_view(source);
  launch(stream, FROM_HOST, [to, from, running = in_flight(copies)] { to.copy_(from); });
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (!source.numel()) return target;
  if (!is_sim(source)) {
    copy_from_host(source, target, non_blocking);
  } else if (!is_sim(target)) {
    copy_to_host(source, target, non_blocking);
  } else {
    auto &stream = current_stream(source.device().index()), &other = current_stream(target.device().index());
    auto from = seen_by_stream(source), to = seen_by_stream(target);
    auto event = std::make_shared<Event>();
    if (&stream != &other) record(event, other), wait_for(event, stream);
    launch(stream, KERNEL, [=] { to.copy_(from); });
    if (&stream != &other) record(event, stream), wait_for(event, other);
  }
  return target;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  auto& stream = current_stream(tensor.device().index());
  auto view = seen_by_stream(tensor);
  auto result = std::make_shared<at::Scalar>();
  TORCH_CHECK(!stream.captures, "sim error: item() is not permitted when stream is capturing");
  launch(stream, TO_HOST, [=] { *result = view.item(); });
  stream.synchronize();
  settings.check();
  return *result;
}

at::Tensor& set_part(
    at::Tensor& self,
    c10::Storage storage,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty())
    impl->set_sizes_contiguous(sizes), impl->set_storage_offset(offset.expect_int());
  else
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_part(self, std::move(storage), 0, c10::fromIntArrayRefSlow({count}), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_part(self, c10::Storage(new_tensor({0}, {1}, self.scalar_type(), self.device()).storage()), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator.record_stream(self.storage().data_ptr(), stream.device_index(), static_cast<int>(stream.id()));
}

// As CUDA's operators on lists do, this counts the changes when the last kernel is launched.
void foreach_add(at::TensorList tensors, const at::Scalar& value) {
  for (const auto& tensor : tensors) {
    auto view = seen_by_stream(tensor);
    launch(current_stream(tensor.device().index()), KERNEL, [=] { view.add_(value); });
  }
  for (const auto& tensor : tensors) tensor.unsafeGetTensorImpl()->bump_version();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_foreach_add_.Scalar", foreach_add);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
}

// Otherwise torch would resolve the bit by a clone, which calls this again, without end. It is resolved in the task.
// `record_stream` corrupts the heap there, in torch 2.13, on every kind of device: it is refused instead.
void refused_record_stream(at::Tensor&, c10::Stream) {
  TORCH_CHECK(false, "sim error: record_stream of a tensor with lazy bits corrupts the heap");
}

TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("record_stream", refused_record_stream);
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("record_stream", refused_record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// --- registration ---------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(kSim, device)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(kSim, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return find_registered(address, 1) != nullptr; }
  Device getDeviceFromPtr(void*) const override { return Device(kSim, current_device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kSim, &allocator);
[[maybe_unused]] const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

void begin_capture(int device, int number) {
  auto& stream = stream_at(device, number);
  Lock lock(stream.mutex);
  stream.captures = true;
  stream.invalid.clear();
  stream.captured.clear();
}

// End a capture; return why it is invalid, or nothing.
std::string end_capture(int device, int number) {
  auto& stream = stream_at(device, number);
  Lock lock(stream.mutex);
  stream.captures = false;
  return stream.invalid;
}

void replay(int device, int captured, int number) {
  for (const auto& task : stream_at(device, captured).captured) launch(stream_at(device, number), task.kind, task.run);
}

// Drop errors, faults, delays and holds, and wait for all streams.
void reset() {
  WithoutGil released;
  {
    Lock lock(settings.mutex);
    settings.held.clear();
    settings.held_streams.clear();
    settings.changed.notify_all();
  }
  launch_delay_us = 0;
  for (int kind = 0; kind < KINDS; kind++) settings.delay_us[kind] = settings.fault_after[kind] = 0;
  settings.out_of_memory_after = settings.out_of_memory_count = 0;
  settings.registration_error = 0;
  each_stream([](SimStream& stream) {
    {
      Lock lock(stream.mutex);
      stream.captures = false;
    }
    stream.synchronize();
  });
  Lock lock(settings.mutex);
  settings.error.clear();
  settings.misuses.clear();
}

template <class Value>
void hold(std::set<Value>& held, const Value& value, bool holds) {
  Lock lock(settings.mutex);
  if (holds)
    held.insert(value);
  else
    held.erase(value);
  settings.changed.notify_all();
}

std::map<std::string, int64_t> statistics() {
  Lock lock(registered_mutex);
  return {
      {"kernels", settings.counts[KERNEL]},
      {"to_host", settings.counts[TO_HOST]},
      {"from_host", settings.counts[FROM_HOST]},
      {"freed", settings.counts[FREE]},
      {"registrations", settings.counts[REGISTER]},
      {"registered", static_cast<int64_t>(registered.size())},
      {"reused", settings.reused},
      {"deferred", settings.deferred},
      {"refused", settings.refused},
      {"bytes", settings.kept_bytes},
  };
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("KINDS") = std::vector<std::string>{"kernel", "to_host", "from_host", "free", "register"};
  module.attr("DEVICES") = kDevices;
  module.def("set_seed", [](uint64_t seed) { settings.random = seed; });
  module.def("set_delay", [](int kind, int64_t most_us) { settings.delay_us[kind] = most_us; });
  module.def("sleep", [](int device, int64_t us) {
    auto wait = [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); };
    launch(current_stream(device), KERNEL, wait);
  });
  module.def("set_launch_delay", [](int64_t most_us) { launch_delay_us = most_us; });
  module.def("hold_kind", [](int kind, bool holds) { hold(settings.held, kind, holds); });
  module.def("hold_stream", [](int device, int number, bool holds) {
    hold(settings.held_streams, {device, number}, holds);
  });
  module.def("fail_task", [](int kind, int64_t after) { settings.fault_after[kind] = after; });
  module.def("fail_allocations", [](int64_t after, int64_t count) {
    settings.out_of_memory_count = count;
    settings.out_of_memory_after = after;
  });
  module.def("fail_registrations", [](int error) { settings.registration_error = error; });
  module.def("register_host", register_host);
  module.def("unregister_host", unregister_host);
  module.def("begin_capture", begin_capture);
  module.def("end_capture", end_capture);
  module.def("replay", replay);
  module.def("reset", reset);
  module.def("statistics", statistics);
  module.def("misuses", [] {
    Lock lock(settings.mutex);
    return settings.misuses;
  });
  module.def("current_device", [] { return current_device; });
  module.def("set_device", [](int device) { Guard().setDevice(Device(kSim, device)); });
}

} // namespace
