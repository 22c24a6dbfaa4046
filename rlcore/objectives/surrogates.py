r"""What one token contributes: the gain that ``policy_loss`` maximises, before it is averaged.

Each function answers question 3 in its own way: how the importance ratio $\rho$ and the advantage
$A$ of a token make a gain.  Where the policy has not moved ($\rho = 1$) all have the gradient
$A\,\nabla\log\pi_\theta$; they differ in what happens as it moves away.

The arguments are those that ``policy_loss`` has checked: ``ratio``, ``logprobs`` and ``advantages``
are $(B, T)$, or $(B, 1)$ where all tokens of a response share the value, finite everywhere;
``advantages`` carry no gradient.
"""

import torch
from torch import Tensor

SURROGATES = ("clip", "reinforce", "capped", "soft", "gamma")
# Their gradient flows through the ratio, which is 1 in padded slots; that of the others through
# log pi, which is 0 there.
USE_RATIO = ("clip", "soft")
USE_RANGE = ("clip", "capped")


def clip(
    ratio: Tensor,
    advantages: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    ratio_max: float | None = None,
) -> Tensor:
    r"""PPO: $\min\big(\rho A,\ \mathrm{clip}(\rho)\,A\big)$, clipped to the range from ``low`` to
    ``high``, $1 - \epsilon_{low}$ to $1 + \epsilon_{high}$.

    The minimum limits $\rho$ only on the side to which $A$ pushes it: above where $A > 0$, below
    where $A < 0$.  So it is $A$ times $\rho$ clipped on that side; no gradient beyond it.

    ``ratio_max`` is the limit of $\rho$ where $A < 0$, which the range leaves open:
    $\min\big(\min(\rho, r_{max})\,A,\ \mathrm{clip}(\rho)\,A\big)$, for
    $r_{max} \ge 1 + \epsilon_{high}$.  Without it one token that the policy has made far likelier,
    and that turns out bad, has a loss without bound.

    Sources: PPO, arXiv 1707.06347, eq. 7; $r_{max}$: DCPO, arXiv 2509.02333, sec. 2 (TRL's
    ``delta``; verl's dual clip, ``clip_ratio_c``).
    """
    if not isinstance(low, Tensor):
        low = advantages.new_full((), low)
    if not isinstance(high, Tensor):
        high = advantages.new_full((), high)
    beyond = torch.inf if ratio_max is None else float(ratio_max)
    lowest = torch.where(advantages < 0, low, 0.0)
    highest = torch.where(advantages > 0, high, beyond)
    return advantages * ratio.clamp(lowest, highest)


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    r"""$A \log\pi_\theta$: no ratio, so exact only for responses drawn from $\pi_\theta$ itself.

    Source: Williams 1992; Ahmadian et al., arXiv 2402.14740 (RLOO).
    """
    return advantages * logprobs


def capped(
    ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    low: float | Tensor,
    high: float | Tensor,
) -> Tensor:
    r"""CISPO: $\mathrm{sg}[\hat\rho]\,A \log\pi_\theta$ with
    $\hat\rho = \mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high})$.

    The weight is clipped and not the gain, so no token loses its gradient.  The paper clips with
    both offsets and in practice leaves the lower end open ($\epsilon_{low} = 1$).

    Source: MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5; the value of $\epsilon_{high}$ is not
    published.  What differs in TRL: ``epsilon_high`` is the cap ITSELF there (5.0 in ScaleRL), not
    an offset from 1; DAPO's 0.28 left in place caps every weight at 0.28.
    """
    weight = ratio.detach().clamp(low, high)  # type: ignore[arg-type]
    return weight * advantages * logprobs


def soft(
    ratio: Tensor, advantages: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    r"""SAPO: $f(\rho)\,A$ with $f(\rho) = \frac4\tau\,\sigma\big(\tau(\rho - 1)\big)$, a gate that
    closes smoothly; $f'(1) = 1$, so the first step is that of ``clip``.

    ``tau_positive`` where $A > 0$; ``tau_negative``, which closes faster, where $A < 0$ (and at
    $A = 0$, where it changes nothing).

    Source: arXiv 2511.20347, as TRL and two other frameworks have it.  What differs elsewhere: one
    framework's page of version 3.11 leaves out the factor $4 / \tau$, its next version has it.
    """
    positive, negative = (advantages.new_full((), tau) for tau in (tau_positive, tau_negative))
    tau = torch.where(advantages > 0, positive, negative)
    return torch.sigmoid(tau * (ratio - 1)) * (4 / tau * advantages)


def gamma(ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    r"""VESPO: $\mathrm{sg}[\phi(W)]\,A \log\pi_\theta$, with $W$ the ratio of the whole response
    (``ratio_level="sequence_sum"``) and $\phi$ from ``gamma_weight``.

    Source: arXiv 2602.10693, as TRL has it.
    """
    return gamma_weight(ratio, advantages) * advantages * logprobs


def gamma_weight(ratio: Tensor, advantages: Tensor) -> Tensor:
    r"""$\phi(W) = W^k e^{\lambda (1 - W)}$, without gradient: 1 at $W = 1$, falling to 0 on
    both sides.

    $(k, \lambda) = (2, 3)$ where $A \ge 0$ and $(3, 2)$ where $A < 0$, as in TRL, which is
    where the formula is taken from (there $W$ is also kept above $10^{-8}$, where $\phi$ is 0 to 14
    digits).  ``ratio``: at level ``"sequence_sum"``.
    """
    ratio = ratio.detach().clamp(max=1e9)  # phi is 0 from far below on, and W^k stays finite
    favoured = ratio.square() * torch.exp(3 * (1 - ratio))
    disfavoured = ratio.pow(3) * torch.exp(2 * (1 - ratio))
    return torch.where(advantages >= 0, favoured, disfavoured)
