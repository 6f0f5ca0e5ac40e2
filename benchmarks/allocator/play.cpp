// Plays allocations ("a ID BYTES STREAM") and frees ("f ID") of the standard input through PyTorch's
// allocator. After each: allocated bytes, reserved bytes, times that memory went back to a full
// device, and "full" if the request failed.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <unistd.h>

#include <cstdio>
#include <unordered_map>

namespace allocator = c10::cuda::CUDACachingAllocator;

int main() {
  allocator::init(1);
  c10::cuda::detail::init_p2p_access_cache(1);
  std::unordered_map<long, void*> held;
  char kind;
  long id;
  while (scanf(" %c %ld", &kind, &id) == 2) {
    const char* full = "";
    if (kind == 'a') {
      size_t bytes, stream;
      if (scanf("%zu %zu", &bytes, &stream) != 2) return 1;
      try {
        held[id] =
            allocator::get()->raw_alloc_with_stream(bytes, reinterpret_cast<cudaStream_t>(stream));
      } catch (const c10::Error&) {
        full = " full";
      }
    } else if (auto found = held.find(id); found != held.end()) {
      allocator::raw_delete(found->second);
      held.erase(found);
    }
    const auto stats = allocator::getDeviceStats(0);
    printf("%ld %ld %ld%s\n", long(stats.allocated_bytes[0].current),
           long(stats.reserved_bytes[0].current), long(stats.num_alloc_retries), full);
  }
  fflush(stdout);
  _exit(0);  // destructors would ask the driver
}
