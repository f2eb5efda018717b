/* The same collectives, sizes and measure as the example beside this file, through MPI. Prints, from rank 0, one line
 * for each round: the operation, the bytes of the whole buffer, the time in seconds. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *operations[] = {"all-reduce", "all-gather", "reduce-scatter"};
    /* Arguments: pairs of bytes and rounds. */
    for (int argument = 1; argument + 1 < argc; argument += 2) {
        long bytes = atol(argv[argument]);
        int rounds = atoi(argv[argument + 1]);
        int count = (int)(bytes / sizeof(float)), part = count / size;
        float *buffer = malloc((size_t)bytes);
        float *slice = malloc((size_t)bytes);
        double *times = malloc(sizeof(double) * (size_t)rounds);
        for (int i = 0; i < count; i++) buffer[i] = (float)(i % 7);
        memset(slice, 0, (size_t)bytes);
        for (int operation = 0; operation < 3; operation++) {
            for (int round = -1; round < rounds; round++) {
                MPI_Barrier(MPI_COMM_WORLD);
                double begin = MPI_Wtime();
                if (operation == 0)
                    MPI_Allreduce(MPI_IN_PLACE, buffer, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                else if (operation == 1)
                    MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, buffer, part, MPI_FLOAT, MPI_COMM_WORLD);
                else
                    MPI_Reduce_scatter_block(buffer, slice, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                /* The first one warms up. */
                if (round >= 0) times[round] = MPI_Wtime() - begin;
            }
            for (int round = 0; rank == 0 && round < rounds; round++)
                printf("time %s %ld %.9f\n", operations[operation], bytes, times[round]);
        }
        free(buffer);
        free(slice);
        free(times);
    }
    MPI_Finalize();
    return 0;
}
