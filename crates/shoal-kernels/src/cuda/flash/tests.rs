//! Flash attention against its definition in f64, and against itself run twice. Without a GPU each test says
//! that it was skipped.

use std::sync::OnceLock;

use super::*;
use crate::cpu::CpuDevice;
use crate::device::Device;
use crate::random::{fill_normal, fold, key_of, mix32};

const BUDGET_BYTES: u64 = 8 << 30;

fn gpu() -> Option<&'static CudaDevice> {
    static GPU: OnceLock<Option<CudaDevice>> = OnceLock::new();
    let open = || CudaDevice::new("cuda:0", 0, BUDGET_BYTES).unwrap_or_else(|error| panic!("{error}"));
    // A GPU that is there must open.
    let gpu = GPU.get_or_init(|| CudaDevice::count().is_ok_and(|count| count > 0).then(open));
    if gpu.is_none() {
        eprintln!("skipped: no GPU on this machine");
    }
    gpu.as_ref()
}

/// Random halves of deviation 1.
fn halves(element: Element, key: u64, elements: usize) -> Vec<u16> {
    let mut values = vec![0.0; elements];
    fill_normal(&mut values, key, 0, 1.0);
    values.into_iter().map(|value| element.encode(value)).collect()
}

fn upload(gpu: &CudaDevice, element: Element, bits: &[u16]) -> Tensor {
    let tensor = Tensor::of(gpu.arena(), "a test", element, bits.len()).unwrap();
    // SAFETY: the tensor is that long.
    unsafe { gpu.context.copy_in(tensor.at(0).0, bits) }.unwrap();
    tensor
}

/// A tensor that nothing has written: all NaN, whichever the half.
fn unwritten(gpu: &CudaDevice, element: Element, elements: usize) -> Tensor {
    upload(gpu, element, &vec![0x7fff; elements])
}

fn unwritten_numbers(gpu: &CudaDevice, elements: usize) -> Tensor {
    let mut tensor = Tensor::new(gpu.arena(), "a test", elements).unwrap();
    gpu.write_floats(&mut tensor, &mut |out| out.fill(f32::NAN)).unwrap();
    tensor
}

fn download(gpu: &CudaDevice, tensor: &Tensor) -> Vec<u16> {
    let mut bits = vec![0; tensor.len()];
    // SAFETY: the tensor is that long.
    unsafe { gpu.context.copy_out(&mut bits, tensor.at(0).0) }.unwrap();
    bits
}

/// One shape with its inputs.
struct Case {
    element: Element,
    shape: AttentionShape,
    site: Option<DropoutSite<'static>>,
    lengths: Option<Vec<i32>>,
    qkv: Vec<u16>,
    out_gradient: Vec<u16>,
}

impl Case {
    fn random(key: u64, element: Element) -> Case {
        let number = |name: &str| fold(key, key_of(name));
        let pick = |name: &str, from: &[usize]| from[(number(name) % from.len() as u64) as usize];
        let kv_heads = pick("kv_heads", &[1, 2, 3]);
        // 20 is no whole number of 16-byte chunks.
        let head_size = pick("head_size", &[64, 64, 80, 96, 128, 128, 40, 20]);
        let shape = AttentionShape {
            samples: pick("samples", &[1, 2, 4]),
            sequence: pick("sequence", &[1, 2, 17, 31, 63, 64, 65, 127, 128, 130, 193, 257, 300]),
            heads: kv_heads * pick("group", &[1, 2, 4]),
            kv_heads,
            head_size,
            scale: [0.5f32, 1.0, 2.0][(number("sharpness") % 3) as usize] / (head_size as f32).sqrt(),
            causal: number("causal") % 4 > 0,
        };
        let site = (number("dropout") & 1 == 1).then(|| DropoutSite {
            rate: 0.2,
            key: number("key"),
            step: None,
            first_sample: number("first") % 100,
        });
        let length = |sample| 1 + (fold(number("lengths"), sample) % shape.sequence as u64) as i32;
        let lengths = (number("padded") % 2 == 0).then(|| (0..shape.samples as u64).map(length).collect());
        Case {
            element,
            shape,
            site,
            lengths,
            qkv: halves(element, number("qkv"), shape.rows() * shape.qkv_width()),
            out_gradient: halves(element, number("dout"), shape.rows() * shape.query_width()),
        }
    }

    /// How many of a sample's rows count.
    fn length(&self, sample: usize) -> usize {
        self.lengths.as_ref().map_or(self.shape.sequence, |lengths| lengths[sample] as usize)
    }

    fn lengths_on(&self, device: &dyn Device) -> Option<Tensor> {
        self.lengths.as_ref().map(|lengths| {
            let mut tensor = Tensor::new(device.arena(), "a test", lengths.len()).unwrap();
            device.write_integers(&mut tensor, lengths).unwrap();
            tensor
        })
    }

    /// Output, gradient and logarithms of sums from the GPU.
    fn run(&self, gpu: &CudaDevice) -> (Vec<u16>, Vec<u16>, Vec<f32>) {
        let (element, shape, site) = (self.element, self.shape, self.site);
        assert!(gpu.flash_serves(element, &shape));
        let qkv = upload(gpu, element, &self.qkv);
        let out_gradient = upload(gpu, element, &self.out_gradient);
        let mut out = unwritten(gpu, element, out_gradient.len());
        let mut gradient = unwritten(gpu, element, qkv.len());
        let mut logsumexp = unwritten_numbers(gpu, shape.rows() * shape.heads);
        let mut delta = unwritten_numbers(gpu, logsumexp.len());
        let lengths = self.lengths_on(gpu);
        gpu.flash_forward(shape, site, lengths.as_ref(), &qkv, &mut out, &mut logsumexp).unwrap();
        gpu.flash_backward(
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
        let numbers = gpu.host_floats(&logsumexp).unwrap().into_owned();
        (download(gpu, &out), download(gpu, &gradient), numbers)
    }

    /// The same in f64, by the definition.
    fn reference(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let AttentionShape { samples, sequence, heads, kv_heads, head_size: size, scale, .. } = self.shape;
        let (width, out_width, scale) = (self.shape.qkv_width(), self.shape.query_width(), f64::from(scale));
        let values = |bits: &[u16]| -> Vec<f64> {
            bits.iter().map(|bits| f64::from(self.element.decode(*bits))).collect()
        };
        let (qkv, out_gradient) = (values(&self.qkv), values(&self.out_gradient));
        let mut out = vec![0.0; out_gradient.len()];
        let mut gradient = vec![0.0; qkv.len()];
        let mut logsumexp = vec![0.0; samples * heads * sequence];
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let add = |to: &mut [f64], factor: f64, from: &[f64]| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
        };
        let units = (0..samples).flat_map(|sample| {
            (0..heads).flat_map(move |head| (0..sequence).map(move |query| (sample, head, query)))
        });
        let units = units.enumerate().filter(|(_, (sample, _, query))| *query < self.length(*sample));
        for (unit, (sample, head, query)) in units {
            let kv_head = head / (heads / kv_heads);
            let start = |row: usize, column: usize| (sample * sequence + row) * width + column * size;
            let key_at = |key| start(key, heads + kv_head)..start(key, heads + kv_head) + size;
            let value_at =
                |key| start(key, heads + kv_heads + kv_head)..start(key, heads + kv_heads + kv_head) + size;
            let query_at = start(query, head)..start(query, head) + size;
            let out_start = (sample * sequence + query) * out_width + head * size;
            let out_at = out_start..out_start + size;
            let slopes_out = &out_gradient[out_at.clone()];
            let keys = self.shape.keys_seen(query).min(self.length(sample));
            let scores: Vec<f64> =
                (0..keys).map(|key| scale * dot(&qkv[query_at.clone()], &qkv[key_at(key)])).collect();
            let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - highest).exp()).sum();
            logsumexp[unit] = highest + total.ln();
            let weights: Vec<f64> = scores.iter().map(|score| (score - logsumexp[unit]).exp()).collect();
            let factors: Vec<f64> =
                (0..keys).map(|key| self.factor(sample, head * sequence + query, key)).collect();
            for key in 0..keys {
                add(&mut out[out_at.clone()], weights[key] * factors[key], &qkv[value_at(key)]);
            }
            let delta = dot(&out[out_at], slopes_out);
            for key in 0..keys {
                let product = dot(slopes_out, &qkv[value_at(key)]);
                let slope = weights[key] * (factors[key] * product - delta) * scale;
                add(&mut gradient[value_at(key)], weights[key] * factors[key], slopes_out);
                add(&mut gradient[key_at(key)], slope, &qkv[query_at.clone()]);
                add(&mut gradient[query_at.clone()], slope, &qkv[key_at(key)]);
            }
        }
        (out, gradient, logsumexp)
    }

    /// What dropout makes of a weight: the same on every device.
    fn factor(&self, sample: usize, row: usize, key: usize) -> f64 {
        let Some(site) = self.site else { return 1.0 };
        let mask = fold(fold(site.key, site.first_sample + sample as u64), row as u64) as u32;
        let hash = mix32((key as u32).wrapping_mul(0x9e37_79b9).wrapping_add(mask));
        let kept = f64::from(hash) >= (f64::from(site.rate) * 4_294_967_296.0).floor();
        if kept { 1.0 / (1.0 - f64::from(site.rate)) } else { 0.0 }
    }

    fn name(&self) -> String {
        let AttentionShape { samples, sequence, heads, kv_heads, head_size, .. } = self.shape;
        let causal = if self.shape.causal { "causal" } else { "full" };
        let dropout = if self.site.is_some() { "dropout" } else { "all kept" };
        format!(
            "{:?} {samples} x {heads}/{kv_heads} x {sequence} x {head_size} {causal}, {dropout}, lengths {:?}",
            self.element, self.lengths
        )
    }

    /// What is off beyond the half's own rounding, in words.
    fn check(&self, gpu: &CudaDevice) -> Vec<String> {
        let (out, gradient, logsumexp) = self.run(gpu);
        let (expected_out, expected_gradient, expected_logsumexp) = self.reference();
        let values = |bits: &[u16]| -> Vec<f64> {
            bits.iter().map(|bits| f64::from(self.element.decode(*bits))).collect()
        };
        let shape = &self.shape;
        let (width, size) = (shape.qkv_width(), shape.head_size);
        let columns = |from: &[f64], first: usize, heads: usize| -> Vec<f64> {
            from.chunks(width).flat_map(|row| &row[first * size..(first + heads) * size]).copied().collect()
        };
        let gradient = values(&gradient);
        let mut parts = vec![("out", values(&out), expected_out)];
        for (what, first, heads) in [
            ("dq", 0, shape.heads),
            ("dk", shape.heads, shape.kv_heads),
            ("dv", shape.heads + shape.kv_heads, shape.kv_heads),
        ] {
            let expected = columns(&expected_gradient, first, heads);
            parts.push((what, columns(&gradient, first, heads), expected));
        }
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let tolerance = if self.element == Element::Bf16 { 1e-2 } else { 3e-3 };
        let mut wrong = Vec::new();
        for (what, found, expected) in parts {
            let error = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
            // The weight of an only key does not move: what is found is the rounding of `out`, which has
            // elements of order 1.
            let alone =
                (0..shape.samples).any(|sample| self.length(sample) == 1) && (what == "dq" || what == "dk");
            let size = if alone { (found.len() as f64).sqrt() } else { norm(&mut expected.iter().copied()) };
            if error.is_nan() || error > tolerance * size {
                wrong.push(format!("{what} {:.1e}", error / size));
            }
        }
        let apart = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs();
        let error = logsumexp.iter().zip(&expected_logsumexp).map(apart).fold(0.0, |a, b| {
            // NaN stays.
            if b <= a { a } else { b }
        });
        if error.is_nan() || error > 1e-2 {
            wrong.push(format!("logsumexp {error:.1e}"));
        }
        wrong.into_iter().map(|wrong| format!("{}: {wrong}", self.name())).collect()
    }
}

/// The definition above against the CPU's attention, whose masks are the same.
#[test]
fn the_definition_agrees_with_the_cpu() {
    let cpu = CpuDevice::new("cpu", 2, 1 << 30).unwrap();
    for seed in 0..12 {
        let case = Case::random(fold(key_of("cpu"), seed), Element::F16);
        let (shape, site) = (case.shape, case.site);
        let tensor = |bits: &[u16]| {
            let values: Vec<f32> =
                bits.iter().map(|bits| f64::from(case.element.decode(*bits)) as f32).collect();
            Tensor::from_floats(cpu.arena(), "a test", &values).unwrap()
        };
        let (qkv, out_gradient) = (tensor(&case.qkv), tensor(&case.out_gradient));
        let zeros = |elements| Tensor::zeros(cpu.arena(), "a test", elements).unwrap();
        let (mut out, mut gradient) = (zeros(out_gradient.len()), zeros(qkv.len()));
        let (mut logsumexp, mut delta) =
            (zeros(shape.rows() * shape.heads), zeros(shape.rows() * shape.heads));
        let lengths = case.lengths_on(&cpu);
        cpu.attention(shape, site, lengths.as_ref(), &qkv, &mut out, &mut logsumexp).unwrap();
        cpu.attention_backward(
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
        let (expected_out, expected_gradient, expected_logsumexp) = case.reference();
        // There the heads of a row lie together.
        let by_row: Vec<f64> = (0..shape.rows() * shape.heads)
            .map(|unit| {
                let (row, head) = (unit / shape.heads, unit % shape.heads);
                let (sample, query) = (row / shape.sequence, row % shape.sequence);
                expected_logsumexp[(sample * shape.heads + head) * shape.sequence + query]
            })
            .collect();
        for (found, expected) in [(&out, expected_out), (&gradient, expected_gradient), (&logsumexp, by_row)]
        {
            for (found, expected) in found.floats().iter().zip(&expected) {
                let error = (f64::from(*found) - expected).abs();
                assert!(error < 1e-4 * expected.abs().max(1.0), "{}: {found}, {expected}", case.name());
            }
        }
    }
}

/// The elements this GPU has instructions for.
fn served(gpu: &CudaDevice) -> Vec<Element> {
    let shape = AttentionShape {
        samples: 1,
        sequence: 1,
        heads: 1,
        kv_heads: 1,
        head_size: 64,
        scale: 1.0,
        causal: true,
    };
    [Element::Bf16, Element::F16].into_iter().filter(|element| gpu.flash_serves(*element, &shape)).collect()
}

#[test]
fn flash_attention_agrees_with_the_definition() {
    let Some(gpu) = gpu() else { return };
    let mut wrong = Vec::new();
    let cases = 80;
    for element in served(gpu) {
        for case in 0..cases {
            wrong.extend(Case::random(fold(key_of("flash"), case), element).check(gpu));
        }
        eprintln!("{element:?}: {cases} cases");
    }
    assert!(wrong.is_empty(), "{} are off:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn flash_attention_gives_the_same_bits_again() {
    let Some(gpu) = gpu() else { return };
    let mut wrong = Vec::new();
    for element in served(gpu) {
        for case in 0..20 {
            let case = Case::random(fold(key_of("again"), case), element);
            let (out, gradient, logsumexp) = case.run(gpu);
            let again = case.run(gpu);
            let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
            if (&out, &gradient, bits(&logsumexp)) != (&again.0, &again.1, bits(&again.2)) {
                wrong.push(case.name());
            }
        }
    }
    assert!(wrong.is_empty(), "two runs differ:\n{}", wrong.join("\n"));
}

/// Which kernels the kinds of GPU get: by capability and shared bytes of a block.
#[test]
fn every_gpu_since_turing_has_tiles_that_fit() {
    for (capability, shared_bytes) in
        [((7, 5), 64 << 10), ((8, 0), 163 << 10), ((8, 6), 99 << 10), ((9, 0), 227 << 10)]
    {
        let (model, multiprocessors, is_shared, memory_bytes) = (String::new(), 1, false, 0);
        let facts = GpuFacts { model, capability, multiprocessors, is_shared, memory_bytes, shared_bytes };
        for head_size in [1, 64, 80, 96, 128] {
            let fits = find_all(&facts, head_size).expect("tiles that fit");
            // Neither what flash.cu leaves out, nor a width beyond the next.
            for (kernel, _) in &fits[1..] {
                let narrow = kernel.names[0].ends_with("narrow");
                assert!(kernel.width == 64 || narrow == (capability < (8, 0)) || kernel.width == 128);
                assert!(narrow || kernel.width == 64 || capability >= (8, 0));
                assert!(kernel.width == head_size.max(64).next_multiple_of(32));
            }
            let said: Vec<String> =
                fits.iter().map(|(kernel, bytes)| format!("{} {bytes}", kernel.names[1])).collect();
            eprintln!("sm_{}{}, heads of {head_size}: {}", capability.0, capability.1, said.join(", "));
        }
        assert!(find_all(&facts, 129).is_none());
    }
}
