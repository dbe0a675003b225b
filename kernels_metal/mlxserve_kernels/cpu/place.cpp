// Arrays in memory of large pages: weights and KV pools are read from end to end every step, and with small pages
// the walks of page tables and the prefetchers' stops at page ends cost a third of the read rate.
#include <sys/mman.h>

#include <cstring>
#include <mutex>
#include <new>

#include "mlx/ops.h"
#include "ops.h"
#include "primitive.h"

namespace mlxserve {
namespace {

constexpr std::size_t kLargePage = std::size_t{2} << 20;
constexpr std::size_t kChunk = 16 * kLargePage;
constexpr std::size_t kSmallPage = 4096;
constexpr std::size_t kLine = 64;

// Zeroed memory that arrays share; it goes back to the system with the last of them.
class Chunk {
 public:
  explicit Chunk(std::size_t size) : mapped_(size + kLargePage) {
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char*>(memory);
    auto address = reinterpret_cast<std::uintptr_t>(memory);
    begin_ = next_ = base_ + (round_up(address, kLargePage) - address);
    end_ = begin_ + size;
#if defined(MADV_HUGEPAGE)
    // Where the system has none, small pages do; a rest of a large page takes no more of them than it needs.
    madvise(begin_, size / kLargePage * kLargePage, MADV_HUGEPAGE);
#endif
  }
  ~Chunk() { munmap(base_, mapped_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  // Null where there is no room. The memory has a line in front of it.
  char* take(std::size_t bytes) {
    std::size_t size = round_up(bytes, kLine) + kLine;
    if (size > std::size_t(end_ - next_)) return nullptr;
    char* taken = next_ + kLine;
    next_ += size;
    return taken;
  }

 private:
  std::size_t mapped_;
  char *base_, *begin_, *next_, *end_;
};

std::pair<char*, std::shared_ptr<Chunk>> take(std::size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Chunk> last;
  if (bytes > kChunk / 4) {
    auto own = std::make_shared<Chunk>(round_up(bytes + 2 * kLine, kSmallPage));
    return {own->take(bytes), own};
  }
  std::lock_guard lock(mutex);
  std::shared_ptr<Chunk> chunk = last.lock();
  char* taken = chunk ? chunk->take(bytes) : nullptr;
  if (!taken) {
    chunk = std::make_shared<Chunk>(kChunk);
    last = chunk;
    taken = chunk->take(bytes);
  }
  return {taken, std::move(chunk)};
}

// MLX's CPU buffers begin with their size; arrays may ask for it.
bool has_size_in_front() {
  mx::allocator::Data memory = mx::allocator::malloc(kLine);
  const char* raw = static_cast<const char*>(memory.buffer().raw_ptr());
  return raw - static_cast<const char*>(memory.buffer().ptr()) == sizeof(std::size_t);
}

}  // namespace

mx::array placed(mx::Shape shape, mx::Dtype dtype) {
  static const bool is_possible = has_size_in_front();
  mx::array out(std::move(shape), dtype, nullptr, {});
  out.set_status(mx::array::Status::available);
  const std::size_t bytes = out.nbytes();
  if (!is_possible || !bytes) {
    allocate(out);
    if (bytes) std::memset(out.data<char>(), 0, bytes);
    return out;
  }
  auto [memory, chunk] = take(bytes);
  std::memcpy(memory - sizeof bytes, &bytes, sizeof bytes);
  out.set_data(mx::allocator::Data(mx::allocator::Buffer(memory - sizeof bytes),
                                   [held = std::move(chunk)](mx::allocator::Buffer) {}));
  return out;
}

mx::array resize_rows(mx::array a, int rows) {
  require(a.ndim() >= 1 && rows >= 0, "resize_rows: rows must be positive, got ", rows);
  mx::Shape shape = a.shape();
  shape[0] = rows;
  mx::array out = placed(std::move(shape), a.dtype());
  if (int kept = std::min(rows, a.shape(0)); kept && a.size()) {
    a = ready(a);
    std::memcpy(out.data<char>(), a.data<char>(), a.nbytes() / a.shape(0) * kept);
  }
  return out;
}

}  // namespace mlxserve
