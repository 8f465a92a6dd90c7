// Trains MNIST with ddp: alone (`mnist`), or on several ranks (`ddprun -n 2 mnist`).
#include "../common/program.h"
#include "run.h"

int main(int argc, char** argv) {
  return examples::run_program("mnist", argc, argv, mnist::parse_options, mnist::run);
}
