// What a source may not do when a macro becomes a variable.
#ifndef NODES
#define NODES 4
#endif

extern "C" __global__ void chooses(float* y) {
#if NODES > 2
    y[0] = 1.0f;
#endif
    y[1] = 2.0f;
}
