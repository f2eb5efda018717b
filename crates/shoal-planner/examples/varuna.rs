//! Varuna's models on its machines: our pipeline beside tensor parallelism, sharding and GPipe's order.

use shoal_planner::pipeline::PipelineError;
use shoal_planner::pipeline::varuna::{Comparison, GPT2_2_5B, GPT2_8_3B, compare, huge};

const GLOBAL_BATCH: usize = 8192;

fn main() -> Result<(), PipelineError> {
    println!(
        "{GLOBAL_BATCH} samples of 1024 tokens on V100s with 10 Gbit/s, estimated; how many times quicker ours is:"
    );
    println!("model        GPUs     a step  tensor parallel  sharded  GPipe");
    for (model, devices) in [(GPT2_2_5B, 60), (GPT2_2_5B, 300), (GPT2_8_3B, 72), (GPT2_8_3B, 300)] {
        let Comparison { ours, tensor_parallel, sharded, gpipe, .. } = compare(model, devices, GLOBAL_BATCH)?;
        println!(
            "{:<11} {devices:>5} {:>8.1} s {:>15.1}x {:>7.2}x {:>5.2}x",
            model.name, ours.seconds, tensor_parallel.ratio, sharded.ratio, gpipe.ratio
        );
    }
    println!("{:#?}", huge(102, 512)?);
    Ok(())
}
