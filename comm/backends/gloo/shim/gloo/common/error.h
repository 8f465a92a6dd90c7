// LibTorch's ProcessGroupGloo.hpp includes this header but uses nothing from it. See
// ../../README.md.
#pragma once
