// Trains a residual network on CIFAR-10: alone (`cifar10`), or on several ranks (`ddprun -n 2
// cifar10`).
#include "../common/program.h"
#include "run.h"

int main(int argc, char** argv) {
  return examples::run_program("cifar10", argc, argv, cifar10::parse_options, cifar10::run);
}
