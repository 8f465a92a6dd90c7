// Replaces the library's is_capturing() in the program that has this file.
#include "support/pretended_capture.h"

#include <ddp/internal/current_stream.h>

namespace ddp {

bool is_capturing(c10::Device /*device*/) { return testing::pretends_to_capture; }

}  // namespace ddp
