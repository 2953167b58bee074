// Who reads which page: prints the owners of all pages, for tests. Built once with FLINT_LAYERS for
// the launch of a run of layers, and once for each kind of attention_sm90/attention.cuh.
//
// Input: positions. Output: position, page, block, warpgroup, a line each.
#include "cuda_on_cpu.h"
#define __noinline__
#if FLINT_LAYERS
#include "flint_layers/share.cuh"
#else
#include "attention_sm90/pages.cuh"
#endif
#include <cstdio>

int main() {
  int position;
  while (scanf("%d", &position) == 1) {
#if FLINT_LAYERS
    for (int block = 0; block < BLOCKS; block++) {
      const attention::Share share = attention::find_share(block, position, WINDOW);
      if (!share.takes_part() || share.kv_head > 0) continue;
      attention::Pages pages;
      (attention::Share&)pages = share;
      for (int item = 0; item < share.count; item++)
        for (int group = 0; group < 2; group++)
          if (item % 2 == pages.first_item(group))
            printf("%d %d %d %d\n", position, pages.page(item), share.cluster, group);
    }
#else
    using namespace attention;
    const Step step = {position, position, position, 1};
    const int length = kWindow ? 0 : split_length(position);
    for (int block = 0; block < kCluster * kClusters; block++) {
      const int rank = kCluster > 1 ? block % kCluster : 0, cluster = block / kCluster;
      const Work work = find_work(step, rank, cluster, length, position);
      if (cluster >= work.clusters) continue;
      for (int item = 0; item < work.count; item++)
        for (int group = 0; group < 2; group++)
          if (item % 2 == work.first_item(group))
            printf("%d %d %d %d\n", position, work.page(item), block, group);
    }
#endif
  }
}
