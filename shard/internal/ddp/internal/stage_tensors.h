// Which tensors are those of a pipeline's stage.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>

namespace ddp {

struct StagePlace {
  int64_t stage = 0;       // of a tied tensor: the first that has it
  ProcessGroup ranks;      // of the pipeline
  ProcessGroup tied_over;  // ranks with a copy of it; null: none
};

/// Makes layouts_of() know the tensors of a stage, while this exists: a module does not know that
/// it is one, and a program clips and saves the module as well as the pipeline around it.
class StageTensors {
 public:
  StageTensors() = default;
  ~StageTensors();
  C10_DISABLE_COPY_AND_ASSIGN(StageTensors);

  /// A tensor that has a place keeps it.
  void add(const at::Tensor& tensor, const StagePlace& place);

 private:
  std::vector<at::Tensor> tensors_;  // alive, so that no other tensor gets the address of one
};

/// Adds the place of the layout's tensor to it, if that has one.
void add_stage_to(ParameterLayout& layout);

}  // namespace ddp
