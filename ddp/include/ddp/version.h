#pragma once

/// Version of this library, "major.minor.patch"; CMake reads it from here.
#define DDP_VERSION "0.1.0"
