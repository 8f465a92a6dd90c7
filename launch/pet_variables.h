#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace ddp::launch {

/// Looks a variable of the environment up, as getenv does.
using Variables = std::function<const char*(const char* name)>;

/// An option that has its value from a variable.
struct TakenVariable {
  std::string variable;
  std::string option;
  std::string value;
  bool is_about_hosts = false;
};

/// Gives options that the command line lacks the values of PET_* variables: PET_NNODES for
/// `--nnodes`. torchrun reads them in the same way, and Kubeflow tells a pod its place by them.
///
/// The command line wins: one that says that there is one host, or that has the hosts by -H, takes
/// none that is about hosts, and where it has an endpoint in one form, the variables of the other
/// form do not count. A ddprun that another one started takes none.
///
/// \param app  after it has parsed the command line. Variables of options that it lacks are
/// ignored.
/// \param nodes  of --nnodes on the command line; empty: not given.
/// \return those that were taken.
/// \throws CLI::ValidationError  naming the variable, the rule and the value.
std::vector<TakenVariable> take_pet_variables(
    CLI::App& app, const std::string& nodes, const Variables& variables);

/// Adds the variables to a text about options: users look for what they have set.
std::string with_variables(std::string text, const std::vector<TakenVariable>& taken);

}  // namespace ddp::launch
