//! Updates, and the norm they are clipped by.

use shoal_kernels::{AdamW, CpuDevice, Device, Element, Guard, Sgd, Tensor, Updated};

use crate::{Case, Output, TOLERANCE, compare, gpu, hold, read, scalar, tensor, tensor_of};

/// Tensors of one update: shorter than a chunk, of several, and many.
fn lengths(case: Case) -> Vec<usize> {
    (0..case.pick("tensors", &[1, 2, 5, 40]))
        .map(|index| {
            let name = format!("tensor {index}");
            case.side(&name) * case.pick(&name, &[1, 3, 7, 64, 400])
        })
        .collect()
}

/// Normal numbers for each of the tensors.
fn values(case: Case, name: &str, lengths: &[usize]) -> Vec<Vec<f32>> {
    let each = lengths.iter().enumerate();
    each.map(|(index, elements)| case.normal(&format!("{name} {index}"), *elements)).collect()
}

fn tensors(device: &dyn Device, values: &[Vec<f32>]) -> Vec<Tensor> {
    values.iter().map(|values| tensor(device, values)).collect()
}

/// Many tensors' numbers, one after the other.
fn joined<'a>(device: &dyn Device, tensors: impl IntoIterator<Item = &'a Tensor>) -> Output {
    let values = tensors.into_iter().flat_map(|tensor| read(device, tensor).values).collect();
    Output { values, element: Element::F32 }
}

#[test]
fn sum_squares() {
    compare("sum_squares", |device, case| {
        let tensors = tensors(device, &values(case, "gradient", &lengths(case)));
        let all: Vec<&Tensor> = tensors.iter().collect();
        let mut sum = scalar(device, f64::NAN);
        device.sum_squares(&all, &mut sum).unwrap();
        let some = device.scalar(&sum).unwrap().into();
        device.sum_squares(&[], &mut sum).unwrap();
        vec![some, device.scalar(&sum).unwrap().into()]
    });
}

/// What decides about an update; at times it decides against.
struct Given {
    norm: Tensor,
    loss: Tensor,
    scale: f32,
    clip_norm: Option<f32>,
}

impl Given {
    fn new(device: &dyn Device, case: Case) -> Given {
        Given {
            norm: scalar(
                device,
                case.pick("norm", &[0.04, 0.04, 9.0, 9.0, 9.0, 1e8, f64::NAN, f64::INFINITY]),
            ),
            loss: scalar(
                device,
                case.pick("loss", &[2.5, 2.5, 2.5, 2.5, 2.5, 2.5, f64::NAN, f64::NEG_INFINITY]),
            ),
            scale: case.pick("scale", &[1.0, 1024.0]),
            clip_norm: case.pick("clip", &[None, Some(1.0)]),
        }
    }

    fn guard(&self) -> Guard<'_> {
        let Given { norm, loss, scale, clip_norm } = self;
        Guard { norm_squared: norm, loss, scale: *scale, clip_norm: *clip_norm }
    }
}

/// Copies of all kinds, longer than what they are copies of. The CPU's would be the parameters themselves: it
/// has none.
fn copies(device: &dyn Device, lengths: &[usize]) -> Vec<Option<Tensor>> {
    let kinds = [None, Some(Element::Bf16), Some(Element::F16), Some(Element::F32)];
    let copy = |(index, elements): (usize, &usize)| {
        let kind = kinds[index % kinds.len()].filter(|_| device.computes(Element::F16))?;
        Some(tensor_of(device, kind, &vec![f32::NAN; elements + index % 3]))
    };
    lengths.iter().enumerate().map(copy).collect()
}

/// A copy is its parameter, rounded; NaN where nothing was updated, and past the parameter's end.
fn assert_copies(device: &dyn Device, updated: bool, parameters: &[Tensor], copies: &[Option<Tensor>]) {
    for (index, (parameter, copy)) in parameters.iter().zip(copies).enumerate() {
        let Some(copy) = copy else { continue };
        let (values, copied) = (read(device, parameter).values, read(device, copy).values);
        for (i, copied) in copied.iter().enumerate() {
            let expected = match values.get(i) {
                Some(value) if updated => copy.element().round(*value),
                _ => f32::NAN,
            };
            let same = *copied == expected || copied.is_nan() && expected.is_nan();
            let kind = copy.element();
            assert!(same, "element {i} of copy {index}, {kind:?}: {copied} instead of {expected}");
        }
    }
}

/// The entries of an update.
fn updates<'a>(
    gradients: &'a [Tensor],
    states: &'a mut [Vec<Tensor>],
    parameters: &'a mut [Tensor],
    copies: &'a mut [Option<Tensor>],
) -> Vec<Updated<'a>> {
    let owned = states.iter_mut().zip(parameters).zip(copies);
    let all = gradients.iter().zip(owned).enumerate();
    all.map(|(index, (gradient, ((state, parameter), copy)))| Updated {
        gradient,
        state,
        parameter,
        copy: copy.as_mut(),
        weight_decay: if index % 2 == 0 { 0.1 } else { 0.0 },
    })
    .collect()
}

#[test]
fn adamw() {
    compare("adamw", |device, case| {
        let lengths = lengths(case);
        let settings = AdamW {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            update: case.pick("update", &[1, 2, 1000]),
        };
        let given = Given::new(device, case);
        let gradients = tensors(device, &values(case, "gradient", &lengths));
        let first = values(case, "first", &lengths);
        let second = values(case, "second", &lengths);
        let mut states: Vec<Vec<Tensor>> = first
            .iter()
            .zip(&second)
            .map(|(first, second)| {
                let squares: Vec<f32> = second.iter().map(|x| x * x).collect();
                vec![tensor(device, first), tensor(device, &squares)]
            })
            .collect();
        let start = values(case, "parameter", &lengths);
        let mut parameters = tensors(device, &start);
        let mut copies = copies(device, &lengths);
        let mut updated = updates(&gradients, &mut states, &mut parameters, &mut copies);
        device.adamw(&settings, given.guard(), &mut updated).unwrap();
        let changed = joined(device, &parameters);
        assert_copies(device, changed.values != start.concat(), &parameters, &copies);
        let moment = |which: usize| joined(device, states.iter().map(|state| &state[which]));
        vec![changed, moment(0), moment(1)]
    });
}

#[test]
fn sgd() {
    compare("sgd", |device, case| {
        let lengths = lengths(case);
        let settings = Sgd { lr: 0.1, momentum: 0.9, update: case.pick("update", &[1, 2]) };
        let given = Given::new(device, case);
        let gradients = tensors(device, &values(case, "gradient", &lengths));
        // The first update must not read what the velocity held.
        let unread = settings.update == 1;
        let with_momentum = case.yes("momentum");
        let mut states: Vec<Vec<Tensor>> = values(case, "velocity", &lengths)
            .iter_mut()
            .map(|velocity| {
                if unread {
                    velocity.fill(f32::NAN);
                }
                if with_momentum { vec![tensor(device, velocity)] } else { Vec::new() }
            })
            .collect();
        let start = values(case, "parameter", &lengths);
        let mut parameters = tensors(device, &start);
        let mut copies = copies(device, &lengths);
        let mut updated = updates(&gradients, &mut states, &mut parameters, &mut copies);
        device.sgd(&settings, given.guard(), &mut updated).unwrap();
        let changed = joined(device, &parameters);
        assert_copies(device, changed.values != start.concat(), &parameters, &copies);
        vec![changed, joined(device, states.iter().flatten())]
    });
}

/// More tensors than one table has entries.
#[test]
fn very_many_tensors() {
    let Some(gpu) = gpu() else { return };
    let cpu = CpuDevice::new("cpu", 2, 1 << 30).unwrap();
    let case = Case { key: 11, element: Element::F32 };
    let lengths: Vec<usize> = (0..9000).map(|index| 1 + index % 5).collect();
    let run = |device: &dyn Device| {
        let gradients = tensors(device, &values(case, "gradient", &lengths));
        let mut norm = scalar(device, f64::NAN);
        device.sum_squares(&gradients.iter().collect::<Vec<_>>(), &mut norm).unwrap();
        let loss = scalar(device, 1.0);
        let guard = Guard { norm_squared: &norm, loss: &loss, scale: 1.0, clip_norm: Some(1.0) };
        let mut states: Vec<Vec<Tensor>> = lengths.iter().map(|_| Vec::new()).collect();
        let mut parameters = tensors(device, &values(case, "parameter", &lengths));
        let mut copies: Vec<Option<Tensor>> = lengths.iter().map(|_| None).collect();
        let mut updated = updates(&gradients, &mut states, &mut parameters, &mut copies);
        device.sgd(&Sgd { lr: 50.0, momentum: 0.0, update: 3 }, guard, &mut updated).unwrap();
        [device.scalar(&norm).unwrap().into(), joined(device, &parameters)]
    };
    let (expected, found, again) = (run(&cpu), run(gpu), run(gpu));
    for (part, ((expected, found), again)) in expected.iter().zip(&found).zip(&again).enumerate() {
        hold(&format!("result {part}"), case.element, TOLERANCE, expected, found, again);
    }
}
