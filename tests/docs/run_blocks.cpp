// Runs the blocks of code in README.md and docs, each with names of its own, on the ranks that
// ddprun starts or alone.
//
// docs_blocks FOLDER [PLACE]  in that folder, where rank 0 writes the files that blocks read;
// PLACE: this one alone
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <string>

#include <ddp/ddp.h>

#include "blocks.h"
#include "names.h"

namespace {

void write_files() {
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::save(net, "net.pt");
  torch::save(sgd, "optimizer.pt");
  torch::OrderedDict<std::string, at::Tensor> dict;
  for (const auto& p : net->named_parameters()) dict.insert(p.key(), p.value().detach());
  ddp::save_safetensors(dict, "model.safetensors");
  std::ofstream lines("a.txt"), more_lines("b.txt");
  for (int i = 0; i < 100; ++i) (i < 70 ? lines : more_lines) << i << '\n';
  std::ofstream("model.safetensors.index.json")
      << R"({"weight_map": {"head.weight": "model.safetensors", "head.bias": "model.safetensors"}})";
}

void begin(const PageBlock& block) {
  if (block.makes_group == ddp::is_initialized()) {
    drop_names();
    block.makes_group ? ddp::destroy_process_group()
                      : void(ddp::init_process_group(
                            ddp::ProcessGroupOptions().timeout(std::chrono::seconds(60))));
  }
  make_names(!block.makes_group);
  if (block.makes_group) return;
  if (ddp::is_main()) write_files();  // anew: another block may have replaced them
  ddp::barrier();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 2 ? argv[2] : "";
  if (argc < 2 || chdir(argv[1]) != 0) return 2;
  std::cout.setstate(std::ios::failbit);  // what the blocks print
  const char* place = "";
  try {
    for (const auto& block : blocks_of_pages()) {
      place = block.place;
      if (*block.why_not_run != '\0' || (!only.empty() && only != place)) continue;
      begin(block);
      block.run();
      if (block.makes_group) ddp::destroy_process_group();
    }
    drop_names();
    if (ddp::is_initialized()) ddp::destroy_process_group();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", place, error.what());
    return 1;
  }
}
