// MLA_HOST_DEVICE: functions that host code and kernels share.
#pragma once

#if defined(__CUDACC__)
#define MLA_HOST_DEVICE __host__ __device__
#else
#define MLA_HOST_DEVICE
#endif
