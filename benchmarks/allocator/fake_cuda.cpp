// The CUDA runtime, driver and NVML that PyTorch's allocator calls, without a card: hands out
// addresses, counts bytes, and is full at FAKE_CAPACITY bytes. Built as libcudart.so.13 and as
// libnvidia-ml.so.1. With FAKE_DOWNWARDS=1 each address is below the last one.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#undef cudaGetDeviceProperties

namespace {
using Address = unsigned long long;

size_t capacity() {
  static const char* text = getenv("FAKE_CAPACITY");
  static size_t bytes = text ? strtoull(text, nullptr, 10) : size_t{1} << 50;
  return bytes;
}

size_t used = 0;
cudaError_t last_error = cudaSuccess;
std::map<Address, size_t> held;  // by address or handle

Address new_address(size_t bytes) {
  constexpr size_t step = 2 << 20;
  static Address up = 0x700000000000ull, down = 0x7f0000000000ull;
  const size_t rounded = (bytes + step - 1) / step * step;
  if (getenv("FAKE_DOWNWARDS")) return down -= rounded;
  up += rounded;
  return up - rounded;
}

bool take(Address key, size_t bytes) {
  if (used + bytes > capacity()) return false;
  used += bytes;
  held[key] = bytes;
  return true;
}

void give(Address key) {
  auto found = held.find(key);
  if (found == held.end()) return;
  used -= found->second;
  held.erase(found);
}

CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *address = new_address(bytes);
  return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                unsigned long long) {
  static Address next = 1;
  if (!take(next, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = next++;
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  give(handle);
  return CUDA_SUCCESS;
}
CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult error_text(CUresult, const char** text) {
  *text = "fake";
  return CUDA_SUCCESS;
}
CUresult nothing() { return CUDA_SUCCESS; }
}  // namespace

#define NOTHING(name, ...) \
  cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define ONE(name, type, value, ...)     \
  cudaError_t name(type* found, ##__VA_ARGS__) { \
    *found = value;                     \
    return cudaSuccess;                 \
  }

extern "C" {
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const Address address = new_address(bytes);
  if (!take(address, bytes)) return last_error = cudaErrorMemoryAllocation;
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  give(reinterpret_cast<Address>(pointer));
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = capacity();
  *free = capacity() - used;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  memset(found, 0, sizeof *found);
  found->totalGlobalMem = capacity();
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  static const std::map<std::string, void*> known = {
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(attribute)},
      {"cuGetErrorString", reinterpret_cast<void*>(error_text)},
  };
  if (status) *status = cudaDriverEntryPointSuccess;
  auto found = known.find(name);
  *function = found == known.end() ? reinterpret_cast<void*>(nothing) : found->second;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "fake"; }
const char* cudaGetErrorString(cudaError_t) { return "fake"; }
ONE(cudaGetDevice, int, 0)
ONE(cudaGetDeviceCount, int, 1)
ONE(cudaDriverGetVersion, int, 13000)
ONE(cudaDeviceCanAccessPeer, int, 0, int, int)
ONE(cudaEventCreateWithFlags, cudaEvent_t, reinterpret_cast<cudaEvent_t>(1), unsigned)
ONE(cudaStreamCreateWithPriority, cudaStream_t, reinterpret_cast<cudaStream_t>(16), unsigned, int)
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* found) {
  *found = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}
NOTHING(cudaDeviceEnablePeerAccess, int, unsigned)
NOTHING(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
NOTHING(cudaDeviceSynchronize)
NOTHING(cudaEventDestroy, cudaEvent_t)
NOTHING(cudaEventElapsedTime, float*, cudaEvent_t, cudaEvent_t)
NOTHING(cudaEventQuery, cudaEvent_t)
NOTHING(cudaEventRecord, cudaEvent_t, cudaStream_t)
NOTHING(cudaEventSynchronize, cudaEvent_t)
NOTHING(cudaFreeAsync, void*, cudaStream_t)
NOTHING(cudaGraphNodeGetDependencies, cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t*)
NOTHING(cudaIpcCloseMemHandle, void*)
NOTHING(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
NOTHING(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
NOTHING(cudaMallocAsync, void**, size_t, cudaStream_t)
NOTHING(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOTHING(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
NOTHING(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOTHING(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
NOTHING(cudaMemcpy, void*, const void*, size_t, cudaMemcpyKind)
NOTHING(cudaMemcpyAsync, void*, const void*, size_t, cudaMemcpyKind, cudaStream_t)
NOTHING(cudaMemcpyPeerAsync, void*, int, const void*, int, size_t, cudaStream_t)
NOTHING(cudaSetDevice, int)
NOTHING(cudaStreamGetCaptureInfo, cudaStream_t, cudaStreamCaptureStatus*, unsigned long long*,
        cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*)
NOTHING(cudaStreamQuery, cudaStream_t)
NOTHING(cudaStreamSynchronize, cudaStream_t)
NOTHING(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
NOTHING(cudaThreadExchangeStreamCaptureMode, cudaStreamCaptureMode*)

// NVML: no fabric, no other processes
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = &used;
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, void*) {
  *n = 0;
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return 0;
}
}
