// The optimizers that programs step with: label, type, the type that the reference has in its
// place, options. An epsilon beside which rounding errors of gradients that are zero do not count.
#pragma once

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
  X("fused_sgd", ddp::optim::SGD, torch::optim::SGD, torch::optim::SGDOptions(0.1))
