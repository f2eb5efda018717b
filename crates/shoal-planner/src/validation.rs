//! Other systems' published measurements beside what our models say. The files are not ours: whoever has them names
//! their folder.

pub mod cephalo;
pub mod comparison;
pub mod deeppool;
mod error;
mod in_stream;
pub mod published;
pub mod sailor;

pub use error::Error;

use shoal_fleet::Link;
use shoal_model::Chain;

/// Never the narrowest: GPUs of those who measured send to network interfaces themselves, and pass no host.
const NO_HOST: Link = Link::new(1e18, 0.0);

/// Of a layer; a tied tensor counts in each layer that uses it.
fn parameters(chain: &Chain, layer: usize) -> u64 {
    chain.layers[layer].tensors.iter().map(|(_, tensor)| chain.tensors[*tensor].elements() as u64).sum()
}
