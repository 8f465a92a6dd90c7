// Included by LibTorch's ProcessGroupGloo.hpp, which uses nothing of it. See ../../README.md.
#pragma once
