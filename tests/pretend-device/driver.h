// The part of CUDA's driver interface that the pretend device, the stand-in for NCCL and Shardwise use. Names and meanings are
// CUDA's; the structs behind the handles are not.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct Context;
struct Stream;
struct Event;
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUcontext = Context *;
using CUstream = Stream *;
using CUevent = Event *;
using CUhostFn = void (*)(void *);

constexpr CUresult CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2,
                   CUDA_ERROR_INVALID_DEVICE = 101, CUDA_ERROR_INVALID_CONTEXT = 201, CUDA_ERROR_NOT_READY = 600;

CUresult cuInit(unsigned flags);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGetUuid_v2(char uuid[16], CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxGetCurrent(CUcontext *context);

CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamQuery(CUstream stream);
// Here the function may wait, because a stream is a thread.
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data);

CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventQuery(CUevent event);
CUresult cuEventSynchronize(CUevent event);
CUresult cuEventDestroy_v2(CUevent event);

CUresult cuMemAllocAsync(CUdeviceptr *data, size_t bytes, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr data, CUstream stream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemGetInfo_v2(size_t *free, size_t *total);

CUresult cuGetErrorName(CUresult error, const char **name);
CUresult cuGetErrorString(CUresult error, const char **text);

// ---- not of CUDA ----------------------------------------------------------------------------------------------------

// The address at which kernels, and nobody else, reach device memory; an address that is not of the device is returned as it is.
void *pretend_kernel_address(const void *data);
// From now on, nothing is computed: memory is not written, so that models of any size have room.
void pretend_set_shapes_only();
bool pretend_has_shapes_only();
// Lets streams pause between calls, at points that depend on the seed. 0 is no pause.
void pretend_set_seed(uint64_t seed);
}
