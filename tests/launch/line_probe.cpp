// Writes two lines as C++ programs do, without a flush, creates a file to show that it has, and
// then ends in the way of its argument, or waits. usage: line_probe MARK wait|abort|segv|kill|exit
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

#include <unistd.h>

int main(int, char** argv) {
  std::cout << "first line" << '\n' << "last line" << '\n';
  std::clog << "a warning" << '\n';
  std::ofstream(argv[1]).flush();
  const std::string end = argv[2];
  if (end == "abort") std::abort();
  if (end == "segv") ::raise(SIGSEGV);
  if (end == "kill") ::raise(SIGKILL);
  if (end == "exit") ::_exit(3);
  for (;;) ::pause();
}
