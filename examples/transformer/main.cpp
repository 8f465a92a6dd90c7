// Trains a language model of characters: alone (`transformer`), or on several ranks (`ddprun -n 2
// transformer`).
#include "../common/program.h"
#include "run.h"

int main(int argc, char** argv) {
  return examples::run_command<transformer::Options>(
      "transformer", argc, argv, transformer::parse_options, transformer::run);
}
