// Whether this process is a rank of a job whose other ranks need not exist: ddprun --pretend.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Macros.h>
#include <ddp/export.h>

namespace ddp {

/// Whether DDP_PRETEND is set.
DDP_API bool is_pretended();

/// \param subject  that needs the other ranks themselves. \param remedy  a sentence.
/// \throws c10::Error  in a pretended rank.
DDP_API void check_not_pretended(const char* subject, const char* remedy);

/// While it exists, a message that this thread receives from a rank that does not exist leaves its
/// tensor as it is: for exchanges of the library's own, whose ranks have equal tensors there. In a
/// pretended rank `received` becomes `sent` before.
class DDP_API EqualMessages {
 public:
  EqualMessages(const at::Tensor& received, const at::Tensor& sent);
  ~EqualMessages();
  C10_DISABLE_COPY_AND_ASSIGN(EqualMessages);

  /// Whether there is one on this thread.
  static bool are_expected();
};

}  // namespace ddp
