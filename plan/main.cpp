// Lists meshes for a model that fit: `ddp_plan --help`.
#include <cstdio>
#include <exception>
#include <iostream>

#include "plan/options.h"
#include "plan/report.h"

int main(int argc, char** argv) {
  using namespace ddp::plan;
  try {
    const auto parsed = parse_options(argc, argv, std::cout, std::cerr);
    if (!parsed.options) return parsed.exit_code;
    const auto& options = *parsed.options;
    const auto plans = make_plans(options.task);
    std::cout
        << (options.json ? json_of(options.task, plans)
                         : table_of(options.task, plans, options.top));
    return plans.fitting.empty() ? 1 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ddp_plan: %s\n", error.what());
    return 1;
  }
}
