// The optimizers that programs step with: label, type, the type that the reference has in its
// place, options. An epsilon beside which rounding errors of gradients that are zero do not count.
// In place of one that LibTorch lacks the reference has the same over whole parameters, in one
// process: tests/training compares its numbers with Python's and papers'.
#pragma once

#include <ddp/elementwise_optimizers.h>
#include <ddp/fused_optimizer.h>
#include <ddp/lamb.h>
#include <ddp/muon.h>

#define DDP_OPTIMIZERS(X)                                                                          \
  X("sgd", torch::optim::SGD, torch::optim::SGD, torch::optim::SGDOptions(0.1))                    \
  X("momentum", torch::optim::SGD, torch::optim::SGD,                                              \
    torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true))                                   \
  X("adam", torch::optim::Adam, torch::optim::Adam, torch::optim::AdamOptions(0.01).eps(1e-3))     \
  X("adamw", torch::optim::AdamW, torch::optim::AdamW, torch::optim::AdamWOptions(0.01).eps(1e-3)) \
  X("adagrad", torch::optim::Adagrad, torch::optim::Adagrad,                                       \
    torch::optim::AdagradOptions(0.05).eps(1e-3))                                                  \
  X("rmsprop", torch::optim::RMSprop, torch::optim::RMSprop,                                       \
    torch::optim::RMSpropOptions(0.01).eps(1e-3))                                                  \
  X("fused_adamw", ddp::optim::AdamW, torch::optim::AdamW,                                         \
    torch::optim::AdamWOptions(0.01).eps(1e-3))                                                    \
  X("fused_sgd", ddp::optim::SGD, torch::optim::SGD, torch::optim::SGDOptions(0.1))                \
  X("nadam", ddp::optim::NAdam, ddp::optim::NAdam,                                                 \
    ddp::optim::NAdamOptions(0.01).eps(1e-3).weight_decay(0.1))                                    \
  X("radam", ddp::optim::RAdam, ddp::optim::RAdam,                                                 \
    ddp::optim::RAdamOptions(0.01).eps(1e-3).weight_decay(0.1).decoupled_weight_decay(true))       \
  X("adamax", ddp::optim::Adamax, ddp::optim::Adamax, ddp::optim::AdamaxOptions(0.01).eps(1e-3))   \
  X("adadelta", ddp::optim::Adadelta, ddp::optim::Adadelta,                                        \
    ddp::optim::AdadeltaOptions(0.5).eps(1e-3))                                                    \
  X("lion", ddp::optim::Lion, ddp::optim::Lion, ddp::optim::LionOptions(0.01).weight_decay(0.1))   \
  X("lamb", ddp::optim::LAMB, ddp::optim::LAMB,                                                    \
    ddp::optim::LAMBOptions(0.01).eps(1e-3).weight_decay(0.1))

/// Options of "muon", which takes matrices, and of the second optimizer, for the rest.
#define DDP_TEXT(...) DDP_TEXT_OF(__VA_ARGS__)
#define DDP_TEXT_OF(...) #__VA_ARGS__
#define DDP_MUON ddp::optim::MuonOptions(0.02).eps(1e-3).ns_dtype(torch::kDouble)
#define DDP_REST torch::optim::SGDOptions(0.05).momentum(0.9)
