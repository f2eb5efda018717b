//! What the library computes against f64 on the host, where there is a GPU; without one, whether it has
//! engines for our graphs on a GPU that is only described. Each test says where it was skipped.

use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::attention::VERSION_OF_OPEN_TILES;
use super::convolution::{Key, proposals};
use super::descriptor::{Descriptor, Kind, Name};
use super::*;
use crate::convolutional::Window;
use crate::cuda::CudaDevice;
use crate::device::Device;
use crate::random::{fill_normal, fold, key_of};
use crate::tensor::Tensor;

const BUDGET_BYTES: u64 = 8 << 30;

/// Making a plan takes a processor about a second, so cases are shared out.
const THREADS_MAX: usize = 12;

/// An H200, as the library writes down GPUs.
const HOPPER: &str = r#"{"cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000,
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "oversizedSharedMemoryPerBlock": 0,
    "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
    "supportCoopLaunch": 1, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "memoryBusWidth": 6144,
    "l2CacheSize": 62914560, "deviceName": "NVIDIA H200", "totalGlobalMem": 150121545728}"#;

fn gpu() -> Option<CudaDevice> {
    match CudaDevice::count() {
        Ok(0) => eprintln!("skipped: no GPU on this machine"),
        Ok(_) => {
            return Some(
                CudaDevice::new("cuda:0", 0, BUDGET_BYTES).unwrap_or_else(|error| panic!("{error}")),
            );
        }
        Err(error) => eprintln!("skipped: {error}"),
    }
    None
}

fn open(gpu: &CudaDevice) -> Option<Cudnn> {
    let cudnn = Cudnn::open(gpu.context.clone()).unwrap_or_else(|error| panic!("{error}"));
    if cudnn.is_none() {
        eprintln!("skipped: no cuDNN of version {OLDEST_VERSION} or newer");
    }
    cudnn
}

/// A Hopper that is only described, where the library is here and a GPU is not; else a line that says why the
/// test is skipped.
fn described() -> Option<Target> {
    if CudaDevice::count().is_ok_and(|count| count > 0) {
        eprintln!("skipped: on a GPU other tests say more");
        return None;
    }
    // SAFETY: only asks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        eprintln!("skipped: no cuDNN on this machine");
        return None;
    }
    // SAFETY: every version has it.
    let version = unsafe { sys::cudnnGetVersion() };
    if version < OLDEST_VERSION {
        eprintln!("skipped: cuDNN {version} is older than {OLDEST_VERSION}");
        return None;
    }
    let describe = || {
        let mut gpu = Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?;
        gpu.set(Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, HOPPER.as_bytes())?;
        gpu.finalize()?;
        Ok::<_, Refusal>(Target::Described(gpu))
    };
    match describe() {
        Ok(target) => Some(target),
        Err(refusal) => {
            eprintln!("skipped: cuDNN cannot work without a GPU here: {refusal}");
            None
        }
    }
}

/// Layers of ResNet-50, the first one too, and one whose channels are multiples of nothing.
#[test]
fn hopper_convolves() {
    let Some(target) = described() else { return };
    let mut refused = 0;
    for (samples, size, channels, outputs, side, stride, padding) in [
        (32, 224, 3, 64, 7, 2, 3),
        (1, 56, 64, 64, 3, 1, 1),
        (128, 28, 256, 256, 3, 2, 1),
        (32, 14, 1024, 2048, 1, 2, 0),
        (3, 9, 5, 7, 3, 1, 1),
    ] {
        let (kernel, padding) = ((side, side), (padding, padding));
        let window = Window { samples, height: size, width: size, channels, kernel, stride, padding };
        for element in [Element::Bf16, Element::F16, Element::F32] {
            for made in [Made::Places, Made::ImageGradient, Made::FilterGradient] {
                for deterministic in [false, true] {
                    let convolution = Convolution {
                        made,
                        element,
                        made_element: element,
                        window,
                        outputs,
                        tf32: false,
                        deterministic,
                    };
                    let posed = convolution.graph().and_then(|graph| graph.pose(&target));
                    let posed = posed.unwrap_or_else(|refusal| panic!("{convolution:?}: {refusal}"));
                    let key = Key { convolution, workspace_bytes: 64 << 20 };
                    let found = proposals(&posed, &key, &target).unwrap();
                    let (count, mut found) = (found.len(), found.into_iter());
                    match found.find_map(|(_, proposed)| posed.prepare(proposed, &target).ok()) {
                        Some(plan) => eprintln!(
                            "{convolution:?}: {count} proposals, {}, workspace {}",
                            plan.choice(),
                            plan.workspace_bytes()
                        ),
                        // For fp32 without TF32 there is not always one that is worth having.
                        None => {
                            refused += usize::from(element != Element::F32);
                            eprintln!("{convolution:?}: none of {count} proposals");
                        }
                    }
                }
            }
        }
    }
    assert_eq!(refused, 0, "convolutions without an engine");
}

#[test]
fn hopper_attends() {
    let Some(target) = described() else { return };
    let newer = VERSION_OF_OPEN_TILES + 1;
    let graphs = [(Pass::Forward, newer), (Pass::Backward, newer), (Pass::Backward, VERSION_OF_OPEN_TILES)];
    let mut refused = 0;
    for (pass, version) in graphs {
        for (causal, kv_heads, head_size) in [(true, 4, 64), (false, 2, 128), (true, 2, 80)] {
            let shape = AttentionShape {
                samples: 3,
                sequence: 100,
                heads: 4,
                kv_heads,
                head_size,
                scale: 1.0,
                causal,
            };
            let problem = Problem { element: Element::Bf16, shape };
            let start = Instant::now();
            let label = format!(
                "{pass:?}, for {version}, causal {causal}, 4 heads of {head_size}, {kv_heads} with keys"
            );
            match build(pass, &problem, version, &target) {
                Ok(plan) => eprintln!(
                    "{label}: {}, workspace {}, {:.2?}",
                    plan.choice(),
                    plan.workspace_bytes(),
                    start.elapsed()
                ),
                Err(refusal) => {
                    refused += 1;
                    eprintln!("{label}: {refusal}");
                }
            }
        }
    }
    assert_eq!(refused, 0, "graphs without an engine");
}

/// Attention and its gradients in f64, in the layout of the device.
struct Reference {
    out: Vec<f64>,
    logsumexp: Vec<f64>,
    gradient: Vec<f64>,
}

fn reference(problem: &Problem, qkv: &[f64], out_gradient: &[f64]) -> Reference {
    let shape = &problem.shape;
    let AttentionShape { samples, sequence, heads, kv_heads, head_size, .. } = *shape;
    let (scale, joint, single) = (f64::from(shape.scale), shape.qkv_width(), shape.query_width());
    let mut made = Reference {
        out: vec![0.0; shape.rows() * single],
        logsumexp: vec![0.0; shape.rows() * heads],
        gradient: vec![0.0; shape.rows() * joint],
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let add = |to: &mut [f64], factor: f64, from: &[f64]| {
        to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
    };
    for sample in 0..samples {
        for head in 0..heads {
            let shared = head / (heads / kv_heads);
            let row = |row: usize, head: usize, width: usize| {
                let first = (sample * sequence + row) * width + head * head_size;
                first..first + head_size
            };
            let query = |i| row(i, head, joint);
            let key = |j| row(j, heads + shared, joint);
            let value = |j| row(j, heads + kv_heads + shared, joint);
            for i in 0..sequence {
                let seen = problem.shape.keys_seen(i);
                let mut p: Vec<f64> = (0..seen).map(|j| scale * dot(&qkv[query(i)], &qkv[key(j)])).collect();
                let most = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let logsumexp = most + p.iter().map(|s| (s - most).exp()).sum::<f64>().ln();
                p.iter_mut().for_each(|s| *s = (*s - logsumexp).exp());
                made.logsumexp[(sample * heads + head) * sequence + i] = logsumexp;
                let out = row(i, head, single);
                for (j, p) in p.iter().enumerate() {
                    add(&mut made.out[out.clone()], *p, &qkv[value(j)]);
                }
                let out_gradient = &out_gradient[out.clone()];
                let average = dot(&made.out[out], out_gradient);
                for (j, p) in p.iter().enumerate() {
                    add(&mut made.gradient[value(j)], *p, out_gradient);
                    let score = scale * p * (dot(out_gradient, &qkv[value(j)]) - average);
                    add(&mut made.gradient[query(i)], score, &qkv[key(j)]);
                    add(&mut made.gradient[key(j)], score, &qkv[query(i)]);
                }
            }
        }
    }
    made
}

#[test]
fn reference_gradients_are_slopes() {
    const STEP: f64 = 1e-5;
    for (causal, heads, kv_heads) in [(true, 4, 2), (false, 3, 1)] {
        let shape =
            AttentionShape { samples: 2, sequence: 5, heads, kv_heads, head_size: 3, scale: 0.7, causal };
        let problem = Problem { element: Element::F16, shape };
        let normal = |name: &str, elements: usize| {
            let mut values = vec![0.0; elements];
            fill_normal(&mut values, key_of(name), 0, 1.0);
            values.into_iter().map(f64::from).collect::<Vec<_>>()
        };
        let mut qkv = normal("qkv", shape.rows() * shape.qkv_width());
        let weights = normal("weights", shape.rows() * shape.query_width());
        let found = reference(&problem, &qkv, &weights).gradient;
        for place in 0..qkv.len() {
            let mut weighed = |by: f64| {
                let kept = qkv[place];
                qkv[place] += by;
                let out = reference(&problem, &qkv, &weights).out;
                qkv[place] = kept;
                out.iter().zip(&weights).map(|(out, weight)| out * weight).sum::<f64>()
            };
            let slope = (weighed(STEP) - weighed(-STEP)) / (2.0 * STEP);
            assert!((slope - found[place]).abs() < 1e-7, "{place}: {slope} against {}", found[place]);
        }
    }
}

/// Relative norm of the difference.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |terms: &mut dyn Iterator<Item = f64>| terms.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}

/// Queries', keys' or values' columns of joint rows.
fn columns(shape: &AttentionShape, joint: &[f64], heads: std::ops::Range<usize>) -> Vec<f64> {
    let columns = heads.start * shape.head_size..heads.end * shape.head_size;
    joint.chunks(shape.qkv_width()).flat_map(|row| row[columns.clone()].to_vec()).collect()
}

/// What one forward and backward left on the device.
#[derive(PartialEq)]
struct Found {
    out: Vec<u16>,
    logsumexp: Vec<u32>,
    gradient: Vec<u16>,
}

/// Device memory with a NaN in every place.
fn poisoned(gpu: &CudaDevice, element: Element, elements: usize) -> Tensor {
    let tensor = Tensor::of(gpu.arena(), "a test", element, elements).unwrap();
    // SAFETY: the tensor is that long.
    unsafe { gpu.context.copy_in(tensor.at(0).0, &vec![u8::MAX; element.bytes() * elements]) }.unwrap();
    tensor
}

fn download<T: Copy + Default>(gpu: &CudaDevice, tensor: &Tensor) -> Vec<T> {
    assert_eq!(size_of::<T>(), tensor.element().bytes());
    let mut values = vec![T::default(); tensor.len()];
    // SAFETY: the tensor is that long.
    unsafe { gpu.context.copy_out(&mut values, tensor.at(0).0) }.unwrap();
    values
}

fn upload(gpu: &CudaDevice, element: Element, values: &[u16]) -> Tensor {
    let tensor = Tensor::of(gpu.arena(), "a test", element, values.len()).unwrap();
    // SAFETY: the tensor is that long.
    unsafe { gpu.context.copy_in(tensor.at(0).0, values) }.unwrap();
    tensor
}

/// The engine of a pass and its workspace, or why there is none.
fn engine(cudnn: &Cudnn, pass: Pass, problem: Problem) -> std::result::Result<usize, String> {
    match cudnn.entry(&mut cudnn.state(), pass, problem).unwrap_or_else(|error| panic!("{error}")) {
        Entry::Ready(plan) => Ok(plan.workspace_bytes()),
        Entry::Refused(reason) => Err(format!("{pass:?}: {reason}")),
    }
}

fn run(
    gpu: &CudaDevice,
    cudnn: &Cudnn,
    problem: Problem,
    qkv: &[u16],
    out_gradient: &[u16],
) -> std::result::Result<Found, String> {
    let Problem { element, shape } = problem;
    let bytes = engine(cudnn, Pass::Forward, problem)?.max(engine(cudnn, Pass::Backward, problem)?);
    let asked = [
        cudnn.forward_workspace(element, &shape).unwrap(),
        cudnn.backward_workspace(element, &shape).unwrap(),
    ];
    assert_eq!(asked.into_iter().max(), Some(Some(bytes)));
    let workspace = poisoned(gpu, Element::F32, bytes.div_ceil(4));
    let (qkv, out_gradient) = (upload(gpu, element, qkv), upload(gpu, element, out_gradient));
    let out = poisoned(gpu, element, shape.rows() * shape.query_width());
    let logsumexp = poisoned(gpu, Element::F32, shape.rows() * shape.heads);
    let gradient = poisoned(gpu, element, shape.rows() * shape.qkv_width());
    let [qkv_at, out_at, logsumexp_at, out_gradient_at, gradient_at, workspace_at] =
        [&qkv, &out, &logsumexp, &out_gradient, &gradient, &workspace].map(|tensor| tensor.at(0));
    // SAFETY: all of the sizes that the shape and the plans ask for.
    unsafe {
        cudnn.forward(element, &shape, qkv_at, out_at, logsumexp_at, workspace_at).unwrap();
        cudnn
            .backward(
                element,
                &shape,
                qkv_at,
                out_at,
                logsumexp_at,
                out_gradient_at,
                gradient_at,
                workspace_at,
            )
            .unwrap();
    }
    Ok(Found {
        out: download(gpu, &out),
        logsumexp: download(gpu, &logsumexp),
        gradient: download(gpu, &gradient),
    })
}

/// How a case went.
enum Verdict {
    Right(String),
    Wrong(String),
    Refused(String),
}

fn judge(problem: &Problem, expected: &Reference, found: &Found) -> Verdict {
    let Problem { element, shape, .. } = *problem;
    let numbers = |bits: &[u16]| bits.iter().map(|bits| f64::from(element.decode(*bits))).collect::<Vec<_>>();
    let gradient = numbers(&found.gradient);
    let tolerance = if element == Element::Bf16 { 1e-2 } else { 3e-3 };
    let (keys, values) = (shape.heads, shape.heads + shape.kv_heads);
    let mut distances = vec![("out", distance(&numbers(&found.out), &expected.out), tolerance)];
    for (name, heads) in [("dq", 0..keys), ("dk", keys..values), ("dv", values..values + shape.kv_heads)] {
        let [found, expected] =
            [&gradient, &expected.gradient].map(|joint| columns(&shape, joint, heads.clone()));
        distances.push((name, distance(&found, &expected), tolerance));
    }
    let differences = found.logsumexp.iter().zip(&expected.logsumexp).map(|(found, expected)| {
        let difference = (f64::from(f32::from_bits(*found)) - expected).abs();
        if difference.is_nan() { f64::INFINITY } else { difference }
    });
    distances.push(("logsumexp", differences.fold(0.0, f64::max), 1e-2));
    let text: Vec<_> = distances.iter().map(|(name, distance, _)| format!("{name} {distance:.1e}")).collect();
    // A NaN is within nothing.
    if distances.iter().all(|(_, distance, tolerance)| distance <= tolerance) {
        Verdict::Right(text.join(", "))
    } else {
        Verdict::Wrong(text.join(", "))
    }
}

fn problems() -> Vec<Problem> {
    let mut problems = Vec::new();
    for sequence in [129, 64, 257, 16, 100] {
        for samples in [3, 1] {
            for head_size in [64, 128, 80, 96] {
                for (heads, kv_heads) in [(2, 2), (4, 2), (3, 1)] {
                    for causal in [true, false] {
                        for element in [Element::Bf16, Element::F16] {
                            let scale = 1.1 / (head_size as f32).sqrt();
                            let shape = AttentionShape {
                                samples,
                                sequence,
                                heads,
                                kv_heads,
                                head_size,
                                scale,
                                causal,
                            };
                            problems.push(Problem { element, shape });
                        }
                    }
                }
            }
        }
    }
    problems
}

fn examine(gpu: &CudaDevice, cudnn: &Cudnn, problem: Problem) -> Verdict {
    let shape = problem.shape;
    let normal = |name: &str, elements: usize| {
        let mut values = vec![0.0; elements];
        fill_normal(&mut values, fold(key_of(name), shape.rows() as u64), 0, 1.0);
        values.iter().map(|value| problem.element.encode(*value)).collect::<Vec<_>>()
    };
    let qkv = normal("qkv", shape.rows() * shape.qkv_width());
    let out_gradient = normal("out gradient", shape.rows() * shape.query_width());
    let exact =
        |bits: &[u16]| bits.iter().map(|bits| f64::from(problem.element.decode(*bits))).collect::<Vec<_>>();
    let expected = reference(&problem, &exact(&qkv), &exact(&out_gradient));
    match run(gpu, cudnn, problem, &qkv, &out_gradient) {
        Err(reason) => Verdict::Refused(reason),
        Ok(found) => judge(&problem, &expected, &found),
    }
}

/// All problems, or the first so many that `SHOAL_CUDNN_CASES` asks for.
#[test]
fn attention_agrees() {
    let Some(gpu) = gpu() else { return };
    let mut problems = problems();
    if let Ok(text) = std::env::var("SHOAL_CUDNN_CASES") {
        problems.truncate(text.parse().expect("SHOAL_CUDNN_CASES is a number"));
    }
    let Some(first) = open(&gpu) else { return };
    eprintln!("cuDNN {}, {} problems", first.version, problems.len());
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let cudnn = open(&gpu).expect("it opened before");
                while let Some(problem) = problems.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let Problem { element, shape } = problem;
                    let verdict = examine(&gpu, &cudnn, *problem);
                    let (word, text) = match &verdict {
                        Verdict::Right(text) => ("right", text),
                        Verdict::Wrong(text) => ("WRONG", text),
                        Verdict::Refused(text) => ("refused", text),
                    };
                    eprintln!(
                        "{word}: {element:?}, causal {}, {} x {}/{} heads x {} x {}: {text}",
                        shape.causal,
                        shape.samples,
                        shape.heads,
                        shape.kv_heads,
                        shape.sequence,
                        shape.head_size
                    );
                    results.lock().unwrap().push((*problem, verdict));
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    let mut bad = 0;
    let mut table = String::from("head size, sequence: right, wrong, refused\n");
    for head_size in [64, 80, 96, 128] {
        for sequence in [16, 64, 100, 129, 257] {
            let mut counts = [0; 3];
            for (problem, verdict) in results.iter().filter(|(problem, _)| {
                (problem.shape.head_size, problem.shape.sequence) == (head_size, sequence)
            }) {
                let must = [64, 128].contains(&problem.shape.head_size);
                let (place, is_bad) = match verdict {
                    Verdict::Right(_) => (0, false),
                    Verdict::Wrong(_) => (1, true),
                    Verdict::Refused(_) => (2, must),
                };
                counts[place] += 1;
                bad += usize::from(is_bad);
            }
            writeln!(table, "{head_size}, {sequence}: {counts:?}").unwrap();
        }
    }
    eprintln!("{table}");
    assert_eq!(bad, 0, "problems wrong, or refused that must work");
}
