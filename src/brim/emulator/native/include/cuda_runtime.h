/* Stand-in for the CUDA toolkit's header. */
#pragma once
#include "cuda_runtime_api.h"
