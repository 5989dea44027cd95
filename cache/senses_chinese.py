"""Chinese word lists; `cache.senses` says what each is for."""

from __future__ import annotations

from cache.senses import Senses, groups, words

CHINESE = Senses(
    telltale=frozenset(),
    function=words("的 吗 呢 啊 吧 请 请问 是 在 一下 地 得 可以 能 能否 能不能 我想 么"),
    filler=words("其实 真的 到底 现在 谢谢 你好 您好"),
    light=words("方法 办法 方式 步骤"),
    negation=words("不 没 没有 无 非 别 未 勿 不能 不要 不可以 无法 不会 除了 避免 禁止 不可"),
    markers=groups(
        """
        之前, 以前, 前
        之后, 以后, 后
        期间
        最多, 最大, 最高
        最少, 最小, 最低
        更多, 更大
        更少, 更小
        以上, 超过
        以下, 低于
        第一, 首
        最后
        下一个, 下个
        上一个, 上个
        只, 仅, 只有
        都, 所有, 全部, 每
        总是
        今天
        明天
        昨天
        必须, 得要
        应该
        如果
        多少
        几
        谁
        哪里, 哪儿, 在哪
        什么时候, 何时
        为什么, 为何
        多久, 多长时间
        比
        从
        到
        给
        被
        让
        向
        """
    ),
    persons={
        "我": "me",
        "我的": "me:has",
        "你的": "you:has",
        "您的": "you:has",
        "他的": "he:has",
        "她的": "she:has",
        "我们": "me",
        "你": "you",
        "您": "you",
        "你们": "you",
        "他": "he",
        "她": "she",
        "他们": "they",
    },
    relations=frozenset(),
    same=groups(
        """
        怎么, 如何, 怎样, 怎么样才能, 怎么才能
        取消, 退订
        修改, 更改, 更换
        打开, 开启, 启用
        关闭, 关掉, 停用, 禁用
        密码, 口令
        手机, 移动电话
        购买, 买
        价格, 价钱, 多少钱
        订单, 订购单
        退款, 退钱
        电脑, 计算机
        什么, 啥, 哪个
        营业时间, 开门时间
        """
    ),
    opposite=groups(
        """
        打开, 关闭
        购买, 卖, 出售
        增加, 减少
        上, 下
        左, 右
        大, 小
        多, 少
        高, 低
        长, 短
        冷, 热
        借, 还
        进, 出
        """
    ),
)
