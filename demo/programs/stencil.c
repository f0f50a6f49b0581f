/* A numeric kernel: Jacobi sweeps over a square grid. stencil SIDE SWEEPS; two grids of SIDE x SIDE doubles. */
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    size_t side = argc > 1 ? strtoull(argv[1], 0, 10) : 512;
    int sweeps = argc > 2 ? atoi(argv[2]) : 10;
    double *from = calloc(side * side, sizeof *from), *to = calloc(side * side, sizeof *to);
    if (side < 3 || !from || !to) return 1;
    for (size_t x = 0; x < side; x++) from[x] = to[x] = 1.0;
    for (int sweep = 0; sweep < sweeps; sweep++) {
        for (size_t y = 1; y + 1 < side; y++)
            for (size_t x = 1; x + 1 < side; x++) {
                size_t at = y * side + x;
                to[at] = 0.25 * (from[at - 1] + from[at + 1] + from[at - side] + from[at + side]);
            }
        double *other = from;
        from = to;
        to = other;
    }
    printf("%g\n", from[side + side / 2]);
    return 0;
}
