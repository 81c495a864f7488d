// The ranks of an engine that is spread over several GPUs, as far as they wait for each other.
//
// The real ones talk over MPI. These have a Unix socket in the abstract namespace, named after the job,
// so they must be on one machine. They are told their rank by mpirun, or by srun --mpi=pmi2.

#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <thread>
#include <vector>

#include "parameters.h"

class Ranks {
 public:
  // Returns on rank 0 once the others are there. Does not return on the others: they end with status 0
  // when rank 0 has shut down, and wait to be killed if it ends without that.
  explicit Ranks(int needed)
  {
    check(size() == needed, format("MPI size %d != TP size %d * PP size 1 * CP Size 1", size(), needed));
    if (size() == 1) return;
    if (rank() > 0) follow();
    lead();
  }

  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // Tells the others to end.
  ~Ranks()
  {
    for (const int follower : followers_) {
      const char end = 1;
      if (write(follower, &end, 1) != 1) log_warning("a rank has gone before rank 0");
      close(follower);
    }
  }

  static int rank() { return number({"OMPI_COMM_WORLD_RANK", "PMI_RANK"}, 0); }

 private:
  static int size() { return number({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}, 1); }

  static int number(const std::vector<const char*>& names, int otherwise)
  {
    for (const char* name : names)
      if (const char* value = std::getenv(name)) return std::atoi(value);
    return otherwise;
  }

  static socklen_t address(sockaddr_un& name)
  {
    std::string text = format("stand_in_%d", int(getuid()));
    for (const char* part : {"PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID"})
      if (const char* value = std::getenv(part)) text += std::string("_") + value;
    text.resize(std::min(text.size(), sizeof name.sun_path - 2));
    name = {};
    name.sun_family = AF_UNIX;
    text.copy(name.sun_path + 1, text.size());  // a leading 0 is the abstract namespace
    return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }

  void lead()
  {
    sockaddr_un name;
    const socklen_t length = address(name);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(bind(listener, reinterpret_cast<sockaddr*>(&name), length) == 0, "bind");
    check(listen(listener, size()) == 0, "listen");
    while (int(followers_.size()) < size() - 1)
      followers_.push_back(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    close(listener);
  }

  [[noreturn]] static void follow()
  {
    sockaddr_un name;
    const socklen_t length = address(name);
    int leader = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(leader, reinterpret_cast<sockaddr*>(&name), length) != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      close(leader);
      leader = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    }
    char end;
    if (read(leader, &end, 1) == 1) {
      log_line("INFO", "Terminating worker process since shutdown signal was received from leader "
                       "or orchestrator");
      std::exit(0);
    }
    log_warning("rank 0 has ended without a word");
    for (;;) pause();
  }

  std::vector<int> followers_;
};
