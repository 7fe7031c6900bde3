// Feeds execution traces through Chakra's own feeder, as a simulator does: issue, finish, free the children.
#include <cstdio>
#include <string>

#include "et_feeder.h"

int main(int count, char** files) {
  int bad = 0;
  for (int n = 1; n < count; ++n) {
    Chakra::ETFeeder feeder{std::string(files[n])};
    unsigned long issued = 0, kinds[8] = {0}, micros = 0;
    while (auto node = feeder.getNextIssuableNode()) {
      ++issued;
      ++kinds[node->type() & 7];
      micros += node->runtime();
      feeder.freeChildrenNodes(node->id());
      feeder.removeNode(node->id());
    }
    bool stuck = feeder.hasNodesToIssue();
    bad += stuck;
    std::printf("%s %lu issued, %lu compute, %lu sends, %lu receives, %lu collectives, %lu us%s\n", files[n],
                issued, kinds[4], kinds[5], kinds[6], kinds[7], micros, stuck ? ", STUCK" : "");
  }
  return bad;
}
