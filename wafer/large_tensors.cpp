// The memory of large tensors: one range of addresses, in which freed blocks become holes, and adjacent holes are joined.
//
// The C library fits an aligned block only into a hole that is larger by the alignment. A step that frees and makes
// tensors of the same sizes therefore fills several times the memory that it uses at once. Memory that is given back to
// the kernel costs as much to get again as the arithmetic on it. Here a block takes the hole that fits best, and holes
// keep their pages. Beyond a limit on used and kept memory together, holes lose their pages.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kLargeBytes = size_t{256} << 10;   // smaller blocks come from the C library
constexpr size_t kReservedBytes = size_t{1} << 42;  // of addresses, not of memory

struct Hole {
  size_t nbytes;
  size_t resident_bytes;  // an upper bound
};

class Range {
 public:
  Range() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* begin = mmap(nullptr, kReservedBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (begin == MAP_FAILED) throw std::bad_alloc();
    begin_ = top_ = static_cast<char*>(begin);
  }

  bool contains(const void* place) const {
    return begin_ <= place && place < begin_ + kReservedBytes;
  }

  void limit(size_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    limit_bytes_ = nbytes;
    trim();
  }

  void* take(size_t nbytes) {
    nbytes = (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    std::lock_guard<std::mutex> guard(mutex_);
    char* place = top_;
    auto fitting = by_size_.lower_bound({nbytes, nullptr});
    if (fitting != by_size_.end()) {
      place = fitting->second;
      const Hole hole = remove(place);
      const size_t rest = hole.nbytes - nbytes;
      if (rest > 0) add(place + nbytes, {rest, std::min(rest, hole.resident_bytes)});
    } else {
      if (!holes_.empty() && std::prev(holes_.end())->first + std::prev(holes_.end())->second.nbytes == top_) {
        place = std::prev(holes_.end())->first;
        remove(place);
      }
      if (nbytes > static_cast<size_t>(begin_ + kReservedBytes - place)) throw std::bad_alloc();
      top_ = place + nbytes;
    }
    used_[place] = nbytes;
    used_bytes_ += nbytes;
    trim();
    return place;
  }

  void give(void* block) {
    std::lock_guard<std::mutex> guard(mutex_);
    char* place = static_cast<char*>(block);
    const auto used = used_.find(place);
    Hole hole{used->second, used->second};
    used_bytes_ -= hole.nbytes;
    used_.erase(used);
    const auto next = holes_.lower_bound(place);
    const auto previous = next == holes_.begin() ? holes_.end() : std::prev(next);
    char* const behind = next == holes_.end() ? nullptr : next->first;
    char* const before = previous == holes_.end() ? nullptr : previous->first;
    if (behind != nullptr && behind == place + hole.nbytes) hole = joined(hole, remove(behind));
    if (before != nullptr && before + holes_.at(before).nbytes == place) {
      hole = joined(remove(before), hole);
      place = before;
    }
    add(place, hole);
    trim();
  }

 private:
  static Hole joined(const Hole& one, const Hole& other) {
    return {one.nbytes + other.nbytes, one.resident_bytes + other.resident_bytes};
  }

  void add(char* place, const Hole& hole) {
    holes_[place] = hole;
    by_size_.insert({hole.nbytes, place});
    kept_bytes_ += hole.resident_bytes;
  }

  Hole remove(char* place) {
    const auto found = holes_.find(place);
    const Hole hole = found->second;
    holes_.erase(found);
    by_size_.erase({hole.nbytes, place});
    kept_bytes_ -= hole.resident_bytes;
    return hole;
  }

  // The smallest holes that are large enough lose their pages first.
  void trim() {
    while (kept_bytes_ > 0 && used_bytes_ + kept_bytes_ > limit_bytes_) {
      auto found = by_size_.lower_bound({used_bytes_ + kept_bytes_ - limit_bytes_, nullptr});
      while (found != by_size_.end() && holes_.at(found->second).resident_bytes == 0) ++found;
      if (found == by_size_.end()) {
        do --found;
        while (holes_.at(found->second).resident_bytes == 0);
      }
      Hole& hole = holes_.at(found->second);
      madvise(found->second, hole.nbytes, MADV_DONTNEED);
      kept_bytes_ -= hole.resident_bytes;
      hole.resident_bytes = 0;
    }
  }

  std::mutex mutex_;
  char* begin_;
  char* top_;                                   // the addresses from here on have never been used
  std::map<char*, Hole> holes_;                 // no two are adjacent
  std::set<std::pair<size_t, char*>> by_size_;  // the same holes
  std::unordered_map<char*, size_t> used_;
  size_t used_bytes_ = 0;
  size_t kept_bytes_ = 0;  // the resident bytes of holes
  size_t limit_bytes_ = 0;
};

Range& range() {
  static Range* const one = new Range;  // never deleted, since a tensor may outlive every static object
  return *one;
}

class LargeTensors final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* place = nbytes < kLargeBytes ? c10::alloc_cpu(nbytes) : range().take(nbytes);
    return {place, place, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

 private:
  static void release(void* place) {
    if (range().contains(place)) {
      range().give(place);
    } else {
      c10::free_cpu(place);
    }
  }
};

}  // namespace

// Makes torch allocate CPU tensors here from now on.
extern "C" void install() {
  range();
  c10::SetCPUAllocator(new LargeTensors, 1);
}

// Sets the limit on the bytes of blocks and holes together.
extern "C" void limit(size_t nbytes) {
  range().limit(nbytes);
}
