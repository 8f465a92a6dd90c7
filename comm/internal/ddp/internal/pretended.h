// Whether this process is a rank of a job whose other ranks need not exist: ddprun --pretend.
#pragma once

#include <ddp/export.h>

namespace ddp {

/// Whether DDP_PRETEND is set.
DDP_API bool is_pretended();

/// \param subject  that needs the other ranks themselves. \param remedy  a sentence.
/// \throws c10::Error  in a pretended rank.
DDP_API void check_not_pretended(const char* subject, const char* remedy);

}  // namespace ddp
