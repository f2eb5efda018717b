//! Attention and its gradients: causal and not, heads up to 256, grouped queries, sequences on both sides of the
//! tiles, with dropout and without, samples padded and not; elements of two bytes take other kernels than f32.

use shoal_kernels::{AttentionBackward, AttentionShape, DropoutSite};

use crate::{Case, TOLERANCE, active, active_unwritten, compare_elements, integers, read, unwritten};

fn shape(case: Case) -> AttentionShape {
    let (samples, sequence, kv_heads, group) = (
        case.pick("samples", &[1, 2, 3]),
        case.pick("sequence", &[1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 130, 200, 513]),
        case.pick("kv_heads", &[1, 2, 3]),
        case.pick("group", &[1, 2, 4]),
    );
    let head_size = case.pick("head_size", &[1, 3, 8, 17, 32, 64, 65, 80, 96, 128, 129, 200, 256]);
    let scale = case.pick("sharpness", &[0.5f32, 1.0, 3.0]) / (head_size as f32).sqrt();
    let causal = case.yes("causal");
    AttentionShape { samples, sequence, heads: kv_heads * group, kv_heads, head_size, scale, causal }
}

#[test]
fn attention_forward_and_backward() {
    compare_elements("attention", TOLERANCE, |device, case| {
        let shape = shape(case);
        let site = case.yes("dropout").then(|| DropoutSite {
            rate: 0.2,
            key: case.number("key"),
            step: None,
            first_sample: case.number("first") % 100,
        });
        let lengths = case.whole("lengths", shape.samples, 1, shape.sequence as i32 + 1);
        let lengths = case.yes("padded").then(|| integers(device, &lengths));
        let qkv = active(device, case, &case.normal("qkv", shape.rows() * shape.qkv_width()));
        let mut out = active_unwritten(device, case, shape.rows() * shape.query_width());
        let mut logsumexp = unwritten(device, shape.rows() * shape.heads);
        device.attention(shape, site, lengths.as_ref(), &qkv, &mut out, &mut logsumexp).unwrap();
        let out_gradient = active(device, case, &case.normal("dout", out.len()));
        let mut delta = unwritten(device, logsumexp.len());
        let mut gradient = active_unwritten(device, case, qkv.len());
        device
            .attention_backward(
                shape,
                site,
                AttentionBackward {
                    lengths: lengths.as_ref(),
                    qkv: &qkv,
                    out: &out,
                    logsumexp: &logsumexp,
                    out_gradient: &out_gradient,
                    scratch: &mut delta,
                    qkv_gradient: &mut gradient,
                },
            )
            .unwrap();
        // The sums lie in an order of each device's own; the gradient is made from them.
        vec![read(device, &out), read(device, &gradient)]
    });
}
