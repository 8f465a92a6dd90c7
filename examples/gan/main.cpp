// Trains a generator and a discriminator on digits: alone (`gan`), or on several ranks (`ddprun -n
// 2 gan`).
#include "../common/program.h"
#include "run.h"

int main(int argc, char** argv) {
  return examples::run_program("gan", argc, argv, gan::parse_options, gan::run);
}
